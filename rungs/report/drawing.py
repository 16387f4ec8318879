"""The style of all charts, and writing them as PNG files. Colours are Okabe & Ito's
(https://jfly.uni-koeln.de/color/), which colour-blind readers can distinguish; line styles and
markers differ as well, so charts work without colour."""

import contextlib
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from matplotlib import font_manager, style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from rungs.common import disk
from rungs.common.errors import UserError
from rungs.common.shown_text import counted
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.option_values import ChartStyle
from rungs.run.recorded_run import Curve, RecordedSteps
from rungs.run.step_table import FloatArray

# Okabe & Ito's palette without yellow, which is too pale for lines on white.
BLACK, ORANGE, SKY_BLUE, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
COLOURS = (BLUE, VERMILLION, GREEN, BLACK, ORANGE, PURPLE, SKY_BLUE)
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
PALE = "0.75"
STRETCHES = 1500
"""Stretches that a line is thinned to: about one per pixel of a chart's width."""
TRENDS = 100
"""Most points of a smoothed line of one run."""
FAST_COMPRESSION = {"compress_level": 3}
"""Options for Pillow. Its default compression takes 1.4 times as long, for files of 0.8 to 0.9
times the size, and charts are redrawn while training runs."""

AnySteps = RecordedSteps[OptimizationConfig]
Lines = dict[str, Artist]
"""Artists of a chart by their name in the legend."""
STYLES: tuple[str, ...] = get_args(ChartStyle)
PLAIN = {
    "figure.figsize": (10, 6.25),
    "figure.dpi": 160,
    "figure.constrained_layout.use": True,
    "font.size": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "legend.frameon": False,
    "legend.handlelength": 3,
    "lines.markersize": 5,
    "text.parse_math": False,  # the name of a run may contain a dollar sign
}
HAND_FONTS = ("xkcd", "xkcd Script", "Humor Sans", "Comic Neue", "Comic Sans MS", "DejaVu Sans")
HAND_DRAWN = {
    "path.sketch": (1, 100, 2),
    "axes.linewidth": 1.5,
    "axes.grid": False,
    "lines.linewidth": 2,
}


def use_style(chart_style: str) -> contextlib.AbstractContextManager[None]:
    """Return a context with Matplotlib settings that are the same on every machine. Create and
    write charts inside it, as some settings are read by new figures, others when drawing."""
    if chart_style == "plain":
        return style.context(["default", PLAIN])
    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = {"font.family": [font for font in HAND_FONTS if font in installed]}
    return style.context(["default", {**PLAIN, **HAND_DRAWN, **fonts}])


def write_all(
    charts: dict[str, Callable[[Any], Figure]], data: Any, folder: Path, *, creates: bool = True
) -> list[Path]:
    """Draw charts into PNG files of a folder, one figure at a time, and return their paths.
    `creates` makes the folder if it is missing. Files are replaced atomically, as others may read
    or write them meanwhile. Raises UserError if `folder` is a file, or the error of
    `disk.unwritable` if a chart cannot be written."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is there and is no folder; choose another for charts")
    written = []
    for name, draw in charts.items():
        path, picture = folder / name, io.BytesIO()
        with warnings.catch_warnings():
            # Matplotlib draws boxes if the font has no glyph for a character in a run's name.
            warnings.filterwarnings("ignore", "Glyph .* missing from font")
            FigureCanvasAgg(draw(data)).print_png(picture, pil_kwargs=FAST_COMPRESSION)
        try:
            if creates:
                folder.mkdir(parents=True, exist_ok=True)
            disk.replace_file(path, picture.getvalue())
        except OSError as error:
            raise disk.unwritable(path, error, "the chart") from None
        written.append(path)
    return written


def new_chart(title: str, x_label: str, y_label: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """Return an empty chart with panels side by side that share their y axis."""
    figure = Figure()
    axes = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    figure.suptitle(shorten(title, 80), x=0.01, horizontalalignment="left", fontsize=14)
    for panel in axes:
        panel.set_xlabel(x_label)
        panel.use_sticky_edges = False
    axes[0].set_ylabel(y_label)
    return figure, axes


def shorten(text: str, length: int) -> str:
    """Return a text with its middle left out if it is too long."""
    if len(text) <= length:
        return text
    return f"{text[: length // 2 - 1]}…{text[-(length - length // 2) :]}"


def legend(figure: Figure, lines: Mapping[str, Artist], notes: Sequence[str] = ()) -> None:
    """Add a legend below the chart, where it covers no data, with lines of small text above it."""
    # The leading space: Matplotlib leaves out labels that begin with an underscore.
    labels = [f" {shorten(label, 42)}" for label in lines]
    columns = min(len(labels), max(1, 130 // (14 + max(map(len, labels)))))
    figure.legend(
        list(lines.values()),
        labels,
        loc="outside lower center",
        ncols=columns,
        title="\n".join(shorten(note, 140) for note in notes) or None,
        title_fontsize=10,
    )


def log_ticks(low: float, high: float) -> FloatArray:
    """Return up to nine round numbers from `low` to `high`, spaced for a logarithmic axis."""
    if high < 3 * low:
        ticks = np.asarray(MaxNLocator(7, steps=[1, 2, 5, 10]).tick_values(low, high))
        return ticks[(low <= ticks) & (ticks <= high)]
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)))
    for digits in ((1, 1.5, 2, 3, 4, 5, 6, 8), (1, 2, 3, 5), (1, 3), (1,)):
        ticks = np.outer(decades, digits).ravel()
        ticks = ticks[(low <= ticks) & (ticks <= high)]
        if len(ticks) <= 9:
            break
    return ticks[:: len(ticks) // 10 + 1]


def set_log_ticks(axis: Axis, formatter: str | Callable[..., str]) -> None:
    """Give a logarithmic axis a few round ticks between its limits."""
    axis.set_ticks(log_ticks(*axis.get_view_interval()))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(formatter)


def format_number(number: float, _position: float = 0) -> str:
    """Return a number as an axis shows it: 1500000 is 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def log_axis(axes: Axes) -> None:
    """Make the y axis logarithmic, if there are positive values, and fix its limits. Lines skip
    zeros."""
    if not any(np.isfinite(panel.dataLim.minposy) for panel in axes.figure.axes):
        return
    for each in (each for panel in axes.figure.axes for each in panel.get_lines()):
        x, y = np.asarray(each.get_data(), dtype=float)
        if (y > 0).any():
            each.set_data(x[y != 0], y[y != 0])
    axes.set_yscale("log")
    axes.set_ylim(axes.get_ylim())
    set_log_ticks(axes.yaxis, "{x:g}")


def zero_based_axis(axes: Axes) -> None:
    """Begin the y axis at 0, so that heights can be compared."""
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:g}")


def x_axis(axes: Axes) -> None:
    """Give the x axis few, round ticks with short labels."""
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=2))
    axes.xaxis.set_major_formatter(format_number)


def step_axis(axes: Axes, run: RecordedSteps[Any]) -> None:
    """Make the x axis one of steps. If there is a single step, it is the only tick."""
    x_axis(axes)
    if len(run) == 1:
        axes.set_xticks(run.column("global_step"))


def line(axes: Axes, x: FloatArray, y: FloatArray, **look: Any) -> Line2D:
    """Draw a line. If it has few points they get markers, as gaps could hide them."""
    if np.isfinite(y).sum() <= 20:
        look.setdefault("marker", "o")
    return axes.plot(*thin_line(x, y), **look)[0]


def faint_line(axes: Axes, x: FloatArray, y: FloatArray) -> Line2D:
    """Draw every step's value as a pale line in the background."""
    return line(axes, x, y, color=PALE, linewidth=0.7, zorder=0.9, sketch_params=None)


def thin_line(x: FloatArray, y: FloatArray) -> Curve:
    """Return few points whose line looks the same as with all: the lowest and highest point of each
    of `STRETCHES` stretches. A stretch without a number is a gap."""
    length = -(-len(y) // STRETCHES)
    if length <= 2:
        return x, y
    starts = np.arange(0, len(y), length)
    stretches = np.full((len(starts), length), np.nan)
    stretches.flat[: len(y)] = y
    lowest = np.where(np.isnan(stretches), np.inf, stretches).argmin(axis=1)
    highest = np.where(np.isnan(stretches), -np.inf, stretches).argmax(axis=1)
    places = np.unique([starts + lowest, starts + highest])
    return x[places], y[places]


def steps_chart(
    run: AnySteps,
    title: str,
    y_label: str,
    draw: Callable[[Axes], Lines],
    scale: Callable[[Axes], object] | None = None,
) -> Figure:
    """Return a chart over the steps of a run. `draw` draws, and returns the entries of the legend;
    `scale` sets the limits and ticks of the y axis."""
    figure, (axes,) = new_chart(f"{run.name}: {title}", "step", y_label)
    lines = draw(axes)
    if scale is not None:
        scale(axes)
    step_axis(axes, run)
    if lines:
        legend(figure, lines)
    return figure


def trend(axes: Axes, run: AnySteps, field: str, name: str = "") -> Lines:
    """Draw a value of each step, in the background, and of each of `TRENDS` stretches of steps the
    median and a band from the lowest to the highest value."""
    values, length = run.column(field), stretch_length(run)
    if length == 1:
        return {name.rstrip(", ") or "each step": median_line(axes, run, values, BLUE)}
    look: dict[str, Any] = {"color": SKY_BLUE, "alpha": 0.35, "linewidth": 0}
    of, stretch = in_stretches(run.column("global_step"), values, length), counted(length, "step")
    return {
        f"{name}each step": faint_line(axes, run.column("global_step"), values),
        f"{name}min to max of {stretch}": axes.fill_between(of.x, of.low, of.high, **look),
        f"{name}median of {stretch}": median_line(axes, run, values, BLUE),
    }


def median_line(axes: Axes, run: AnySteps, values: FloatArray, color: str) -> Line2D:
    """Draw the median of each of `TRENDS` stretches of steps."""
    of = in_stretches(run.column("global_step"), values, stretch_length(run))
    return line(axes, of.x, of.middle, color=color, linewidth=2)


def stretch_length(run: AnySteps) -> int:
    """Return how many steps a point of a trend stands for."""
    return -(-len(run) // TRENDS)


class Stretches(NamedTuple):
    """Values in stretches of steps: the mean of x, and lowest, middle and highest value."""

    x: FloatArray
    low: FloatArray
    middle: FloatArray
    high: FloatArray


def in_stretches(
    x: FloatArray, y: FloatArray, length: int, middle: Callable[[FloatArray], Any] = np.median
) -> Stretches:
    """Reduce values to stretches of `length`, each to its median or another `middle`. NaN is left
    out unless a stretch has nothing else."""

    def reduced(part: FloatArray) -> tuple[Any, ...]:
        finite = part[np.isfinite(part)]
        return (finite.min(), middle(finite), finite.max()) if len(finite) else (np.nan,) * 3

    places = np.arange(length, len(y), length)
    means = [part.mean() for part in np.split(x, places)]
    return Stretches(np.array(means), *np.array([reduced(part) for part in np.split(y, places)]).T)


def resumes(axes: Axes, run: AnySteps) -> Lines:
    """Mark at the top the steps at which training was resumed."""
    steps = run.column("global_step")[run.column("resumed") > 0]
    if not steps.size:
        return {}
    return {f"resumed ({counted(steps.size, 'time')})": strokes(axes, steps, 0.98, PURPLE)}


def strokes(axes: Axes, steps: FloatArray, height: float, colour: str) -> Line2D:
    """Draw short vertical strokes at a share of the chart's height."""
    look: dict[str, Any] = {"color": colour, "markersize": 12, "markeredgewidth": 2}
    heights, transform = np.full(steps.size, height), axes.get_xaxis_transform()
    return axes.plot(steps, heights, "|", **look, transform=transform)[0]

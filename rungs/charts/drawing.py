"""What charts are drawn on: one look for figures, axes, lines and legends, and pictures on disk.

What a chart shows of a run is in `charts.py`; here is what all charts have in common. Both
making a chart and writing it belong within `styled`: Matplotlib reads some of its settings as a
figure is made, others only as it is drawn.

Colours are those of Okabe & Ito (https://jfly.uni-koeln.de/color/), which the colour-blind tell
apart; line styles and markers tell the same without any colour.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import numpy as np
from matplotlib import font_manager, style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from rungs.common.errors import UserError
from rungs.config.train_config import TrainConfig
from rungs.run.recorded_run import FloatArray, RecordedRun

# Okabe & Ito's palette without its yellow, too pale for lines on white.
BLACK, ORANGE, SKY_BLUE, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILLION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
COLOURS = (BLUE, VERMILLION, GREEN, BLACK, ORANGE, PURPLE, SKY_BLUE)
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
PALE = "0.75"

STYLES: tuple[str, ...] = get_args(TrainConfig.model_fields["chart_style"].annotation)
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
    # A line of a million points is drawn three times as fast in pieces.
    "agg.path.chunksize": 10_000,
    # A run's name may hold a dollar sign.
    "text.parse_math": False,
}
HAND_FONTS = ("xkcd", "xkcd Script", "Humor Sans", "Comic Neue", "Comic Sans MS", "DejaVu Sans")
HAND_DRAWN = {
    "path.sketch": (1, 100, 2),
    "axes.linewidth": 1.5,
    "axes.grid": False,
    "lines.linewidth": 2,
}


def styled(chart_style: str) -> contextlib.AbstractContextManager[None]:
    """Matplotlib's settings while charts are made: the same on every machine."""
    if chart_style == "plain":
        return style.context(["default", PLAIN])
    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = {"font.family": [font for font in HAND_FONTS if font in installed]}
    return style.context(["default", {**PLAIN, **HAND_DRAWN, **fonts}])


def write_all(charts: dict[str, Callable[[Any], Figure]], data: Any, folder: Path) -> list[Path]:
    """Draw and write one chart after the other, so that only one figure is held at a time."""
    return [_write(draw(data), folder / name) for name, draw in charts.items()]


def _write(figure: Figure, path: Path) -> Path:
    """Write the picture whole or not at all, whoever reads or draws it at the same time."""
    picture = io.BytesIO()
    with warnings.catch_warnings():
        # A run's name may be in a script that the font does not have; boxes stand for it then.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        FigureCanvasAgg(figure).print_png(picture)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(picture.getvalue())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise UserError(f"{path}: cannot be written: {error.strerror}") from None
    return path


def chart(title: str, x_label: str, y_label: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty chart: its panels stand side by side and share their y axis."""
    figure = Figure()
    axes = list(figure.subplots(1, panels, sharey=True, squeeze=False)[0])
    figure.suptitle(_shortened(title, 80), x=0.01, horizontalalignment="left", fontsize=14)
    for panel in axes:
        panel.set_xlabel(x_label)
        panel.use_sticky_edges = False
    axes[0].set_ylabel(y_label)
    return figure, axes


def _shortened(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    return f"{text[: length // 2 - 1]}…{text[-(length - length // 2) :]}"


def legend(figure: Figure, lines: Mapping[str, Artist]) -> None:
    """A legend below the chart, where it covers no data."""
    # A space in front: Matplotlib leaves out what begins with an underscore, and a name may.
    labels = [f" {_shortened(label, 42)}" for label in lines]
    columns = min(len(labels), max(1, 130 // (14 + max(map(len, labels)))))
    figure.legend(list(lines.values()), labels, loc="outside lower center", ncols=columns)


def log_ticks(low: float, high: float) -> FloatArray:
    """Up to nine round numbers from `low` to `high`, spread as a logarithmic axis needs them."""
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


def short(number: float, _position: float = 0) -> str:
    """A large number as on an axis: 1500000 is 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def log_axis(axes: Axes) -> None:
    """Make the y axis logarithmic, where it can be, and keep its limits from here on."""
    if not any(np.isfinite(panel.dataLim.minposy) for panel in axes.figure.axes):
        return
    axes.set_yscale("log")
    axes.set_ylim(limits := axes.get_ylim())
    axes.set_yticks(log_ticks(*limits))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def plain_axis(axes: Axes) -> None:
    """Begin the y axis at 0, so that heights can be compared."""
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:g}")


def x_axis(axes: Axes) -> None:
    """Few, round ticks on the x axis, and large numbers short, so that labels have room."""
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=2))
    axes.xaxis.set_major_formatter(short)


def step_axis(axes: Axes, run: RecordedRun) -> None:
    """An x axis of steps; a single step is its only tick, as there is no other to name."""
    x_axis(axes)
    if len(run.steps) == 1:
        axes.set_xticks([run.steps[0].global_step])


def line(axes: Axes, x: FloatArray, y: FloatArray, **look: Any) -> Line2D:
    """A line; its points stand out where they are so few that a gap could hide one."""
    if np.isfinite(y).sum() <= 20:
        look.setdefault("marker", "o")
    return axes.plot(x, y, **look)[0]


def raw(axes: Axes, x: FloatArray, y: FloatArray) -> Line2D:
    """Every step's value, faint, behind what is to be read."""
    return line(axes, x, y, color=PALE, linewidth=0.7, zorder=0.9, sketch_params=None)

"""Charts of a run, and of several runs laid over each other.

    uv run charts.py runs/a             draw that run's charts again
    uv run charts.py runs/a runs/b …    compare runs: charts under comparisons/, tables here

Colours are those of Okabe & Ito (https://jfly.uni-koeln.de/color/), which the colour-blind tell
apart; line styles and markers tell the same without any colour.
"""

import contextlib
import hashlib
import io
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import click
import numpy as np
from matplotlib import font_manager, style
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

import records
from config import TrainConfig
from errors import UserError, run_command
from metrics import METRICS_FILE, StepMetrics
from records import Curve, FloatArray, RecordedRun
from run_folder import find_run

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


def draw_run(
    run_folder: Path, output_folder: Path | None = None, chart_style: str | None = None
) -> list[Path]:
    """Draw the charts of a run from its metrics and configs alone.

    Matplotlib's settings change for the whole process meanwhile: draw in one thread only.

    Args:
        output_folder: where to write the charts; the run folder itself where absent.
        chart_style: one of `STYLES`; what `train.json` says where absent.

    Returns:
        The files written; none where no step has been recorded yet.

    Raises:
        UserError: where a config is wrong or a chart cannot be written.
    """
    run = RecordedRun.load(run_folder)
    if not run.steps:
        return []
    with _styled(chart_style or run.config.train.chart_style):
        return _write_all(RUN_CHARTS, run, output_folder or run_folder)


def draw_comparison(
    runs: list[RecordedRun], output_folder: Path, chart_style: str | None = None
) -> list[Path]:
    """Draw charts with all the runs on each, in the style of the first run where none is given.

    Raises:
        UserError: where a chart cannot be written.
    """
    with _styled(chart_style or runs[0].config.train.chart_style):
        return _write_all(COMPARISON_CHARTS, runs, output_folder)


def _styled(chart_style: str) -> contextlib.AbstractContextManager[None]:
    """Matplotlib's settings while charts are made: the same on every machine."""
    if chart_style == "plain":
        return style.context(["default", PLAIN])
    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = {"font.family": [font for font in HAND_FONTS if font in installed]}
    return style.context(["default", {**PLAIN, **HAND_DRAWN, **fonts}])


def _write_all(charts: dict[str, Callable[[Any], Figure]], data: Any, folder: Path) -> list[Path]:
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


def _chart(title: str, x_label: str, y_label: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
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


def _legend(figure: Figure, lines: Mapping[str, Artist]) -> None:
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


def _short(number: float, _position: float = 0) -> str:
    """A large number as on an axis: 1500000 is 1.5M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:g}{letter}"
    return f"{number:g}"


def _log_axis(axes: Axes) -> None:
    """Make the y axis logarithmic, where it can be, and keep its limits from here on."""
    if not any(np.isfinite(panel.dataLim.minposy) for panel in axes.figure.axes):
        return
    axes.set_yscale("log")
    axes.set_ylim(limits := axes.get_ylim())
    axes.set_yticks(log_ticks(*limits))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def _plain_axis(axes: Axes) -> None:
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:g}")


def _x_axis(axes: Axes) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, steps=[1, 2, 5, 10], min_n_ticks=2))
    axes.xaxis.set_major_formatter(_short)


def _step_axis(axes: Axes, run: RecordedRun) -> None:
    _x_axis(axes)
    if len(run.steps) == 1:
        axes.set_xticks([run.steps[0].global_step])


def _line(axes: Axes, x: FloatArray, y: FloatArray, **look: Any) -> Line2D:
    """A line; its points stand out where they are so few that a gap could hide one."""
    if np.isfinite(y).sum() <= 20:
        look.setdefault("marker", "o")
    return axes.plot(x, y, **look)[0]


def _raw(axes: Axes, x: FloatArray, y: FloatArray) -> Line2D:
    """Every step's value, faint, behind what is to be read."""
    return _line(axes, x, y, color=PALE, linewidth=0.7, zorder=0.9, sketch_params=None)


def loss_chart(run: RecordedRun) -> Figure:
    """Training and validation loss over the steps, with the best step."""
    figure, (axes,) = _chart(f"{run.name}: loss", "step", "loss (nats per token)")
    steps = run.column("global_step")
    lines = _training_loss(axes, run)
    validation = records.finite(steps, run.column("validation_loss"))
    if validation[0].size:
        lines["validation"] = axes.plot(*validation, "s--", color=VERMILLION, linewidth=1.5)[0]
    _log_axis(axes)
    _step_axis(axes, run)
    if run.best_step:
        lines["best step"] = _mark_best(axes, run.best_step)
    _legend(figure, lines)
    return figure


def _training_loss(axes: Axes, run: RecordedRun) -> dict[str, Artist]:
    steps, loss = run.column("global_step"), run.column("train_loss")
    spans = records.by_interval(steps, loss, run.config.train.checkpoint_interval)
    return {
        "training, each step": _raw(axes, steps, loss),
        "training, min to max between checkpoints": axes.stairs(
            spans.high, spans.edges, baseline=spans.low, fill=True, color=SKY_BLUE, alpha=0.35
        ),
        "training, mean between checkpoints": _line(
            axes, spans.middles, spans.mean, color=BLUE, linewidth=2
        ),
    }


def _mark_best(axes: Axes, best: StepMetrics) -> Line2D:
    """A star at the best step, and what it is above the chart, where it covers no data."""
    kind = "training" if best.validation_loss is None else "validation"
    loss = best.train_loss if best.validation_loss is None else best.validation_loss
    assert loss is not None
    step, (left, right) = best.global_step, axes.get_xlim()
    third = int(np.clip(3 * (step - left) / (right - left), 0, 2))
    axes.axvline(step, color=BLACK, linestyle=":", linewidth=1, zorder=1)
    axes.annotate(
        f"best: step {step:,}, {kind} loss {loss:.5g}",
        (step, 1.01),
        xycoords=("data", "axes fraction"),
        horizontalalignment=("left", "center", "right")[third],
    )
    # A loss of 0 has no place on a logarithmic axis: its star stands at the bottom.
    place = max(loss, axes.get_ylim()[0])
    return axes.plot(step, place, "*", color=ORANGE, markeredgecolor=BLACK, markersize=15)[0]


def learning_rate_chart(run: RecordedRun) -> Figure:
    """The learning rate of each step."""
    figure, (axes,) = _chart(f"{run.name}: learning rate", "step", "learning rate")
    _line(axes, run.column("global_step"), run.column("learning_rate"), color=BLUE, linewidth=2)
    _plain_axis(axes)
    _step_axis(axes, run)
    return figure


def gradient_norm_chart(run: RecordedRun) -> Figure:
    """The norm of each step's gradient before clipping, and the steps that were meddled with."""
    title = f"{run.name}: gradient norm before clipping"
    figure, (axes,) = _chart(title, "step", "global norm of the gradient")
    lines = _raw_and_median(axes, run.column("global_step"), run.column("gradient_norm"))
    if limit := run.config.train.clipping_max_norm:
        lines[f"clipping at {limit:g}"] = axes.axhline(limit, color=BLACK, linestyle="--")
    lines |= _meddled_steps(axes, run)
    _log_axis(axes)
    _step_axis(axes, run)
    _legend(figure, lines)
    return figure


def _meddled_steps(axes: Axes, run: RecordedRun) -> dict[str, Artist]:
    steps, norm = run.column("global_step"), run.column("gradient_norm")
    clipped, dropped = run.column("clipped") > 0, run.column("dropped_microbatches") > 0
    marks: dict[str, Artist] = {}
    if clipped.any():
        label = f"clipped ({clipped.sum():,} of {len(steps):,} steps)"
        look: dict[str, Any] = {"color": ORANGE, "markersize": 5.5, "zorder": 2.5}
        marks[label] = axes.plot(steps[clipped], norm[clipped], "v", **look)[0]
    if dropped.any():
        # Along the bottom: the gradient of a step that lost all its microbatches has no norm.
        label = f"microbatches dropped ({dropped.sum():,} steps)"
        look = {"color": VERMILLION, "markersize": 12, "markeredgewidth": 2}
        look["transform"] = axes.get_xaxis_transform()
        marks[label] = axes.plot(steps[dropped], np.full(dropped.sum(), 0.02), "|", **look)[0]
    return marks


def _raw_and_median(axes: Axes, x: FloatArray, y: FloatArray) -> dict[str, Artist]:
    return {
        "each step": _raw(axes, x, y),
        "running median": _line(axes, *records.running_median(x, y), color=BLUE, linewidth=2),
    }


def throughput_chart(run: RecordedRun) -> Figure:
    """Training tokens per second of each step."""
    figure, (axes,) = _chart(f"{run.name}: throughput", "step", "training tokens per second")
    steps, speed = run.column("global_step"), run.column("tokens_per_second")
    _legend(figure, _raw_and_median(axes, steps, speed))
    _throughput_axis(axes, [records.running_median(steps, speed)])
    _step_axis(axes, run)
    return figure


def _throughput_axis(axes: Axes, medians: list[Curve]) -> None:
    """From 0, so that a stall is a dip; a step that was timed too short is cut off."""
    highest = max(np.fmax.reduce(y, initial=0) for _, y in medians)
    axes.set_ylim(0, 1.2 * highest or 1)
    axes.yaxis.set_major_formatter(_short)


RUN_CHARTS: dict[str, Callable[[RecordedRun], Figure]] = {
    "loss-chart.png": loss_chart,
    "learning-rate-chart.png": learning_rate_chart,
    "gradient-norm-chart.png": gradient_norm_chart,
    "throughput-chart.png": throughput_chart,
}


POINTS = 50
"""So many points, each standing for a stretch of its run, make an overlaid line."""


def loss_by_step(runs: list[RecordedRun]) -> Figure:
    """Loss of all runs over their steps."""
    return _loss_overlay(runs, "step", [run.column("global_step") for run in runs])


def loss_by_tokens(runs: list[RecordedRun]) -> Figure:
    """Loss of all runs over the training tokens they have seen."""
    return _loss_overlay(runs, "training tokens seen", [run.column("tokens_seen") for run in runs])


def loss_by_time(runs: list[RecordedRun]) -> Figure:
    """Loss of all runs over the time they have trained."""
    longest = max(run.seconds[-1] for run in runs)
    units = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
    unit = [name for name, size in units.items() if size == 1 or longest >= 3 * size][-1]
    times = [run.seconds / units[unit] for run in runs]
    return _loss_overlay(runs, f"wall time of training ({unit})", times)


def _loss_overlay(runs: list[RecordedRun], x_label: str, xs: list[FloatArray]) -> Figure:
    """Training loss on the left; validation loss, where there is any, on the right."""
    pairs = list(zip(xs, runs, strict=True))
    training = [records.stretch_means(x, run.column("train_loss"), POINTS) for x, run in pairs]
    validation = [records.finite(x, run.column("validation_loss")) for x, run in pairs]
    panels = {"training, mean over each 2% of the run": training}
    if any(x.size for x, _ in validation):
        panels["validation"] = validation
    figure, axes = _overlay(runs, x_label, "loss (nats per token)", panels)
    _log_axis(axes)
    return figure


def learning_rates(runs: list[RecordedRun]) -> Figure:
    """The learning rate of all runs over their steps."""
    curves = [(run.column("global_step"), run.column("learning_rate")) for run in runs]
    figure, axes = _overlay(runs, "step", "learning rate", {"": curves})
    _plain_axis(axes)
    return figure


def gradient_norms(runs: list[RecordedRun]) -> Figure:
    """The gradient norm before clipping of all runs over their steps."""
    curves = [_medians(run, "gradient_norm") for run in runs]
    label = "gradient norm before clipping (running median)"
    figure, axes = _overlay(runs, "step", label, {"": curves})
    _log_axis(axes)
    return figure


def throughputs(runs: list[RecordedRun]) -> Figure:
    """Training tokens per second of all runs over their steps."""
    curves = [_medians(run, "tokens_per_second") for run in runs]
    label = "training tokens per second (running median)"
    figure, axes = _overlay(runs, "step", label, {"": curves})
    _throughput_axis(axes, curves)
    return figure


def _medians(run: RecordedRun, field: str) -> Curve:
    return records.running_median(run.column("global_step"), run.column(field), POINTS)


def _overlay(
    runs: list[RecordedRun], x_label: str, y_label: str, panels: dict[str, list[Curve]]
) -> tuple[Figure, Axes]:
    """Panels side by side that share their y axis, each with a curve for each run."""
    names = ", ".join(run.name for run in runs)
    subject = names if len(names) <= 60 else f"{len(runs)} runs"
    title = f"{subject}: {y_label.partition(' (')[0]}"
    figure, axes = _chart(title, x_label, y_label, len(panels))
    for panel, (title, curves) in zip(axes, panels.items(), strict=True):
        panel.set_title(title, fontsize="medium")
        _x_axis(panel)
        lines = _lines(panel, curves)
    _legend(figure, dict(zip((run.name for run in runs), lines, strict=True)))
    return figure, axes[0]


def _lines(axes: Axes, curves: list[Curve]) -> list[Line2D]:
    """Lines that differ in colour, dashes and markers; the lower ones are wider, so that they
    show where lines coincide."""
    return [
        axes.plot(
            *curve,
            color=COLOURS[i % len(COLOURS)],
            linestyle=DASHES[i % len(DASHES)],
            marker=MARKERS[i % len(MARKERS)],
            markevery=(0.1 * i / len(curves), 0.1) if records.finite(*curve)[0].size > 20 else None,
            linewidth=2.6 - 1.4 * i / len(curves),
        )[0]
        for i, curve in enumerate(curves)
    ]


COMPARISON_CHARTS: dict[str, Callable[[list[RecordedRun]], Figure]] = {
    "loss-by-step-chart.png": loss_by_step,
    "loss-by-tokens-chart.png": loss_by_tokens,
    "loss-by-time-chart.png": loss_by_time,
    "learning-rate-chart.png": learning_rates,
    "gradient-norm-chart.png": gradient_norms,
    "throughput-chart.png": throughputs,
}


@click.command()
@click.argument("runs", nargs=-1, required=True)
@click.option("--output-dir", type=click.Path(path_type=Path), help="Where to write the charts.")
@click.option("--style", "chart_style", type=click.Choice(STYLES), help="Look of the charts.")
def main(runs: tuple[str, ...], output_dir: Path | None, chart_style: str | None) -> None:
    """Draw the charts of one run again, or compare several RUNS.

    A run is a folder, or the name of one under runs/. One run's charts go into its own folder;
    a comparison's go under comparisons/, and its tables are printed.
    """
    folders = list({(path := find_run(run)).resolve(): path for run in runs}.values())
    if len(folders) > 1:
        _compare(folders, output_dir, chart_style)
        return
    written = draw_run(folders[0], output_dir, chart_style)
    if not written:
        raise UserError(_no_steps(folders[0]))
    for path in written:
        click.echo(path)


def _compare(folders: list[Path], output_dir: Path | None, chart_style: str | None) -> None:
    runs = records.load_runs(folders)
    empty = [folder for folder, run in zip(folders, runs, strict=True) if not run.steps]
    if empty:
        raise UserError("\n".join(map(_no_steps, empty)))
    names = [folder.resolve().name for folder in folders]
    for path in draw_comparison(runs, output_dir or comparison_folder(names), chart_style):
        click.echo(path)
    click.echo(f"\n{records.figures_table(runs)}\n\n{records.differences_table(runs)}")


def _no_steps(run_folder: Path) -> str:
    return f"{run_folder / METRICS_FILE}: no step recorded yet; nothing to draw"


def comparison_folder(names: list[str]) -> Path:
    """Where the charts of a comparison go by default: another folder for other runs."""
    joined = "+".join(names)
    if len(joined) > 80:
        digest = hashlib.sha256(joined.encode()).hexdigest()[:8]
        joined = f"{names[0][:40]}+{len(names) - 1}-more-{digest}"
    return Path("comparisons") / joined


if __name__ == "__main__":
    run_command(main)

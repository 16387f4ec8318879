"""Charts of a run, and of several runs laid over each other.

What a chart shows is here; what it is drawn on, and how it gets to disk, is in `drawing.py`. Run as
a module with a run folder, it draws that run's charts: training does so, in a process of its own.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rungs.charts import drawing
from rungs.charts.drawing import BLACK, BLUE, COLOURS, DASHES, MARKERS, ORANGE, SKY_BLUE, VERMILLION
from rungs.run import recorded_run
from rungs.run.metrics import StepMetrics
from rungs.run.recorded_run import Curve, FloatArray, RecordedRun


def draw_run(
    run_folder: Path, output_folder: Path | None = None, chart_style: str | None = None
) -> list[Path]:
    """Draw the charts of a run from its metrics and configs alone.

    Matplotlib's settings change for the whole process meanwhile: draw in one thread only.

    Args:
        output_folder: where to write the charts; the run folder itself where absent.
        chart_style: one of `canvas.STYLES`; what `train.json` says where absent.

    Returns:
        The files written; none where no step has been recorded yet.

    Raises:
        UserError: where a config is wrong or a chart cannot be written.
    """
    run = RecordedRun.load(run_folder)
    if not run.steps:
        return []
    with drawing.styled(chart_style or run.config.train.chart_style):
        return drawing.write_all(RUN_CHARTS, run, output_folder or run_folder)


def draw_comparison(
    runs: list[RecordedRun], output_folder: Path, chart_style: str | None = None
) -> list[Path]:
    """Draw charts with all the runs on each, in the style of the first run where none is given.

    Raises:
        UserError: where a chart cannot be written.
    """
    with drawing.styled(chart_style or runs[0].config.train.chart_style):
        return drawing.write_all(COMPARISON_CHARTS, runs, output_folder)


def loss_chart(run: RecordedRun) -> Figure:
    """Training and validation loss over the steps, with the best step."""
    figure, (axes,) = drawing.chart(f"{run.name}: loss", "step", "loss (nats per token)")
    steps = run.column("global_step")
    lines = _training_loss(axes, run)
    validation = recorded_run.finite_points(steps, run.column("validation_loss"))
    if validation[0].size:
        lines["validation"] = axes.plot(*validation, "s--", color=VERMILLION, linewidth=1.5)[0]
    lines |= _spikes(axes, run)
    drawing.log_axis(axes)
    drawing.step_axis(axes, run)
    if run.best_step:
        lines["best step"] = _mark_best(axes, run.best_step)
    drawing.legend(figure, lines)
    return figure


def _training_loss(axes: Axes, run: RecordedRun) -> dict[str, Artist]:
    steps, loss = run.column("global_step"), run.column("train_loss")
    spans = recorded_run.by_interval(steps, loss, run.config.train.checkpoint_interval)
    return {
        "training, each step": drawing.raw(axes, steps, loss),
        "training, min to max between checkpoints": axes.stairs(
            spans.high, spans.edges, baseline=spans.low, fill=True, color=SKY_BLUE, alpha=0.35
        ),
        "training, mean between checkpoints": drawing.line(
            axes, spans.middles, spans.mean, color=BLUE, linewidth=2
        ),
    }


def _spikes(axes: Axes, run: RecordedRun) -> dict[str, Artist]:
    spikes = [(s.global_step, s.train_loss) for s in run.steps if s.spike is not None]
    if not spikes:
        return {}
    skipped = sum(step.spike == "skipped" for step in run.steps)
    label = f"spikes ({len(spikes):,} steps, {skipped:,} of them skipped)"
    look: dict[str, Any] = {"color": VERMILLION, "markersize": 9, "markeredgewidth": 2}
    return {label: axes.plot(*zip(*spikes, strict=True), "x", **look)[0]}


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
    train = run.config.train
    title = f"{run.name}: learning rate of {train.optimizer}, {train.schedule.replace('_', ' ')}"
    figure, (axes,) = drawing.chart(title, "step", "learning rate")
    drawing.line(
        axes, run.column("global_step"), run.column("learning_rate"), color=BLUE, linewidth=2
    )
    drawing.plain_axis(axes)
    drawing.step_axis(axes, run)
    return figure


def gradient_norm_chart(run: RecordedRun) -> Figure:
    """The norm of each step's gradient before clipping, and the steps that were meddled with."""
    title = f"{run.name}: gradient norm before clipping"
    figure, (axes,) = drawing.chart(title, "step", "global norm of the gradient")
    lines = _raw_and_median(axes, run.column("global_step"), run.column("gradient_norm"))
    if limit := run.config.train.clipping_max_norm:
        lines[f"clipping at {limit:g}"] = axes.axhline(limit, color=BLACK, linestyle="--")
    lines |= _meddled_steps(axes, run)
    drawing.log_axis(axes)
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines)
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
        "each step": drawing.raw(axes, x, y),
        "running median": drawing.line(
            axes, *recorded_run.running_median(x, y), color=BLUE, linewidth=2
        ),
    }


def throughput_chart(run: RecordedRun) -> Figure:
    """Training tokens per second of each step."""
    figure, (axes,) = drawing.chart(f"{run.name}: throughput", "step", "training tokens per second")
    steps, speed = run.column("global_step"), run.column("tokens_per_second")
    drawing.legend(figure, _raw_and_median(axes, steps, speed))
    _throughput_axis(axes, [recorded_run.running_median(steps, speed)])
    drawing.step_axis(axes, run)
    return figure


def _throughput_axis(axes: Axes, medians: list[Curve]) -> None:
    """From 0, so that a stall is a dip; a step that was timed too short is cut off."""
    highest = max(np.fmax.reduce(y, initial=0) for _, y in medians)
    axes.set_ylim(0, 1.2 * highest or 1)
    axes.yaxis.set_major_formatter(drawing.short)


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
    training = [recorded_run.binned_means(x, run.column("train_loss"), POINTS) for x, run in pairs]
    validation = [recorded_run.finite_points(x, run.column("validation_loss")) for x, run in pairs]
    panels = {"training, mean over each 2% of the run": training}
    if any(x.size for x, _ in validation):
        panels["validation"] = validation
    figure, axes = _overlay(runs, x_label, "loss (nats per token)", panels)
    drawing.log_axis(axes)
    return figure


def learning_rates(runs: list[RecordedRun]) -> Figure:
    """The learning rate of all runs over their steps."""
    curves = [(run.column("global_step"), run.column("learning_rate")) for run in runs]
    figure, axes = _overlay(runs, "step", "learning rate", {"": curves})
    drawing.plain_axis(axes)
    return figure


def gradient_norms(runs: list[RecordedRun]) -> Figure:
    """The gradient norm before clipping of all runs over their steps."""
    curves = [_medians(run, "gradient_norm") for run in runs]
    label = "gradient norm before clipping (running median)"
    figure, axes = _overlay(runs, "step", label, {"": curves})
    drawing.log_axis(axes)
    return figure


def throughputs(runs: list[RecordedRun]) -> Figure:
    """Training tokens per second of all runs over their steps."""
    curves = [_medians(run, "tokens_per_second") for run in runs]
    label = "training tokens per second (running median)"
    figure, axes = _overlay(runs, "step", label, {"": curves})
    _throughput_axis(axes, curves)
    return figure


def _medians(run: RecordedRun, field: str) -> Curve:
    return recorded_run.running_median(run.column("global_step"), run.column(field), POINTS)


def _overlay(
    runs: list[RecordedRun], x_label: str, y_label: str, panels: dict[str, list[Curve]]
) -> tuple[Figure, Axes]:
    """Panels side by side that share their y axis, each with a curve for each run."""
    names = ", ".join(run.name for run in runs)
    subject = names if len(names) <= 60 else f"{len(runs)} runs"
    title = f"{subject}: {y_label.partition(' (')[0]}"
    figure, axes = drawing.chart(title, x_label, y_label, len(panels))
    for panel, (title, curves) in zip(axes, panels.items(), strict=True):
        panel.set_title(title, fontsize="medium")
        drawing.x_axis(panel)
        lines = _lines(panel, curves)
    drawing.legend(figure, dict(zip((run.name for run in runs), lines, strict=True)))
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
            markevery=(0.1 * i / len(curves), 0.1)
            if recorded_run.finite_points(*curve)[0].size > 20
            else None,
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


if __name__ == "__main__":
    draw_run(Path(sys.argv[1]))

"""Charts of several runs in one picture. To add one, list its function in `COMPARISON_CHARTS`."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rungs.charts import drawing, run_charts
from rungs.run import recorded_run
from rungs.run.recorded_run import Curve, FloatArray, RecordedRun

POINTS = 50
"""Points on the longest run's curve, each the mean or median of one stretch of steps. All runs use
stretches of that length, so equal runs draw equal curves."""


def draw_comparison(
    runs: list[RecordedRun], output_folder: Path, chart_style: str | None = None
) -> list[Path]:
    """Draw charts with all the runs on each, in one of `drawing.STYLES`, the first run's if None.
    Return the files written. Raises UserError if a chart cannot be written."""
    with drawing.use_style(chart_style or runs[0].config.train.chart_style):
        return drawing.write_all(COMPARISON_CHARTS, runs, output_folder)


def loss_by_step(runs: list[RecordedRun]) -> Figure:
    """Loss of all runs over their steps."""
    return _loss_comparison(runs, "step", [run.column("global_step") for run in runs])


def loss_by_tokens(runs: list[RecordedRun]) -> Figure:
    """Loss of all runs over the training tokens seen."""
    tokens = [run.column("tokens_seen") for run in runs]
    return _loss_comparison(runs, "training tokens seen", tokens)


def loss_by_time(runs: list[RecordedRun]) -> Figure:
    """Loss of all runs over training time."""
    longest = max(run.seconds[-1] for run in runs)
    units = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
    unit = [name for name, size in units.items() if size == 1 or longest >= 3 * size][-1]
    times = [run.seconds / units[unit] for run in runs]
    return _loss_comparison(runs, f"training time ({unit})", times)


def _loss_comparison(runs: list[RecordedRun], x_label: str, xs: list[FloatArray]) -> Figure:
    """Training loss on the left and, if any run has it, validation loss on the right."""
    pairs = list(zip(xs, runs, strict=True))
    length = math.ceil(max(map(len, runs)) / POINTS)
    training = [recorded_run.binned_means(x, run.column("train_loss"), length) for x, run in pairs]
    validation = [recorded_run.finite_points(x, run.column("validation_loss")) for x, run in pairs]
    panels = {f"training (mean of {length:,} steps)" if length > 1 else "training": training}
    if any(x.size for x, _ in validation):
        panels["validation"] = validation
    label = "loss (nats per token)"
    figure, axes = _comparison(runs, x_label, label, panels, run_charts.overlaps(runs))
    drawing.log_axis(axes)
    return figure


def learning_rates(runs: list[RecordedRun]) -> Figure:
    """The learning rate of all runs over their steps."""
    curves = [(run.column("global_step"), run.column("learning_rate")) for run in runs]
    figure, axes = _comparison(runs, "step", "learning rate", {"": curves})
    drawing.zero_based_axis(axes)
    return figure


def gradient_norms(runs: list[RecordedRun]) -> Figure:
    """The gradient norm before clipping of all runs over their steps."""
    label = "gradient norm before clipping (running median)"
    figure, axes = _comparison(runs, "step", label, {"": _medians(runs, "gradient_norm")})
    drawing.log_axis(axes)
    return figure


def throughputs(runs: list[RecordedRun]) -> Figure:
    """Training tokens per second of all runs over their steps."""
    curves = _medians(runs, "tokens_per_second")
    label = "training tokens per second (running median)"
    figure, axes = _comparison(runs, "step", label, {"": curves})
    drawing.throughput_axis(axes, [median for _, median in curves])
    return figure


def _medians(runs: list[RecordedRun], field: str) -> list[Curve]:
    """Return each run's running median of a column, all with the same window."""
    longest = max(map(len, runs))
    return [
        recorded_run.running_median(run.column("global_step"), run.column(field), longest, POINTS)
        for run in runs
    ]


def _comparison(
    runs: list[RecordedRun],
    x_label: str,
    y_label: str,
    panels: dict[str, list[Curve]],
    notes: Sequence[str] = (),
) -> tuple[Figure, Axes]:
    """Draw panels side by side that share their y axis, each with one curve per run."""
    names = ", ".join(run.name for run in runs)
    subject = names if len(names) <= 60 else f"{len(runs)} runs"
    title = f"{subject}: {y_label.partition(' (')[0]}"
    figure, axes = drawing.new_chart(title, x_label, y_label, len(panels))
    for panel, (title, curves) in zip(axes, panels.items(), strict=True):
        panel.set_title(title, fontsize="medium")
        drawing.x_axis(panel)
        lines = _lines(panel, curves)
    drawing.legend(figure, dict(zip((run.name for run in runs), lines, strict=True)), notes)
    return figure, axes[0]


def _lines(axes: Axes, curves: list[Curve]) -> list[Line2D]:
    """Draw lines that differ in colour, dashes and markers. Earlier lines are wider, so lines that
    coincide remain visible."""
    return [
        axes.plot(
            *drawing.thin_line(*curve),
            color=drawing.COLOURS[i % len(drawing.COLOURS)],
            linestyle=drawing.DASHES[i % len(drawing.DASHES)],
            marker=drawing.MARKERS[i % len(drawing.MARKERS)],
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

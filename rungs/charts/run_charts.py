"""Charts of one run. To add one, write a function and list it in `RUN_CHARTS`.

`python -m rungs.charts.run_charts RUN` draws them all; training runs that in a separate process.
Comparisons of several runs are in `comparison_charts.py`.
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
from rungs.charts.drawing import BLACK, BLUE, ORANGE, PURPLE, SKY_BLUE, VERMILLION
from rungs.common.errors import UserError
from rungs.run import recorded_run
from rungs.run.metrics import StepMetrics
from rungs.run.recorded_run import FloatArray, RecordedRun

MAX_INTERVALS = 500
"""Of the loss between checkpoints; more would be too narrow to see."""


def draw_run(
    run_folder: Path, output_folder: Path | None = None, chart_style: str | None = None
) -> list[Path]:
    """Draw the charts of a run from its metrics and configs, and return the files written.

    Changes Matplotlib's settings for the whole process, so draw in one thread only.

    Args:
        output_folder: where to write the charts; the run folder if None.
        chart_style: one of `drawing.STYLES`; as `train.json` says if None.

    Returns:
        The files written; none if no step has been recorded yet.

    Raises:
        UserError: a config is wrong, or a chart cannot be written.
    """
    run = RecordedRun.load(run_folder)
    if not len(run):
        return []
    with drawing.use_style(chart_style or run.config.train.chart_style):
        return drawing.write_all(RUN_CHARTS, run, output_folder or run_folder)


def loss_chart(run: RecordedRun) -> Figure:
    """Training and validation loss over the steps, with the best step."""
    figure, (axes,) = drawing.new_chart(f"{run.name}: loss", "step", "loss (nats per token)")
    steps = run.column("global_step")
    lines = _training_loss(axes, run)
    validation = recorded_run.finite_points(steps, run.column("validation_loss"))
    if validation[0].size:
        look: dict[str, Any] = {"marker": "s", "linestyle": "--", "linewidth": 1.5}
        lines["validation"] = drawing.line(axes, *validation, color=VERMILLION, **look)
    lines |= _spikes(axes, run)
    drawing.log_axis(axes)
    drawing.step_axis(axes, run)
    if run.best_step:
        lines["best step"] = _mark_best(axes, run.best_step)
    lines |= _resumes(axes, run)
    drawing.legend(figure, lines)
    return figure


def _training_loss(axes: Axes, run: RecordedRun) -> dict[str, Artist]:
    steps, loss = run.column("global_step"), run.column("train_loss")
    interval = _interval(run)
    spans = recorded_run.by_interval(steps, loss, interval)
    return {
        "training, each step": drawing.faint_line(axes, steps, loss),
        f"training, min to max of {interval:,} steps": axes.stairs(
            spans.high, spans.edges, baseline=spans.low, fill=True, color=SKY_BLUE, alpha=0.35
        ),
        f"training, mean of {interval:,} steps": drawing.line(
            axes, spans.middles, spans.mean, color=BLUE, linewidth=2
        ),
    }


def _interval(run: RecordedRun) -> int:
    """Return the interval of the checkpoints, or the multiple of it that is wide enough to see."""
    interval = run.config.train.checkpoint_interval
    return interval * -(-len(run) // (interval * MAX_INTERVALS))


def _spikes(axes: Axes, run: RecordedRun) -> dict[str, Artist]:
    spikes = [step for step in run.notable if step.spike is not None]
    if not spikes:
        return {}
    skipped = sum(step.spike == "skipped" for step in spikes)
    label = f"loss spikes ({len(spikes):,} steps, {skipped:,} skipped)"
    x, y = np.array([(step.global_step, step.train_loss) for step in spikes], dtype=float).T
    look: dict[str, Any] = {"color": VERMILLION, "markersize": 9, "markeredgewidth": 2}
    return {label: drawing.marks(axes, x, y, "x", **look)}


def _mark_best(axes: Axes, best: StepMetrics) -> Line2D:
    """Draw a star at the best step, and its loss above the chart, where it covers no data."""
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
    # A logarithmic axis cannot show a loss of 0, so its star is at the bottom.
    height = max(loss, axes.get_ylim()[0])
    return axes.plot(step, height, "*", color=ORANGE, markeredgecolor=BLACK, markersize=15)[0]


def learning_rate_chart(run: RecordedRun) -> Figure:
    """The learning rate of each step."""
    train = run.config.train
    schedule = train.schedule.replace("_", " ")
    title = f"{run.name}: learning rate ({train.optimizer}, {schedule} schedule)"
    figure, (axes,) = drawing.new_chart(title, "step", "learning rate")
    drawing.line(
        axes, run.column("global_step"), run.column("learning_rate"), color=BLUE, linewidth=2
    )
    drawing.zero_based_axis(axes)
    drawing.step_axis(axes, run)
    if resumes := _resumes(axes, run):
        drawing.legend(figure, resumes)
    return figure


def gradient_norm_chart(run: RecordedRun) -> Figure:
    """The gradient norm of each step before clipping, with clipped and dropped steps marked."""
    title = f"{run.name}: gradient norm before clipping"
    figure, (axes,) = drawing.new_chart(title, "step", "global gradient norm")
    lines = _steps_and_median(axes, run.column("global_step"), run.column("gradient_norm"))
    if limit := run.config.train.clipping_max_norm:
        lines[f"clipping at {limit:g}"] = axes.axhline(limit, color=BLACK, linestyle="--")
    lines |= _marked_steps(axes, run) | _resumes(axes, run)
    drawing.log_axis(axes)
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines)
    return figure


def _marked_steps(axes: Axes, run: RecordedRun) -> dict[str, Artist]:
    steps, norm = run.column("global_step"), run.column("gradient_norm")
    clipped, dropped = run.column("clipped") > 0, run.column("dropped_microbatches") > 0
    marks: dict[str, Artist] = {}
    if clipped.any():
        label = f"clipped ({clipped.sum():,} of {len(steps):,} steps)"
        look: dict[str, Any] = {"color": ORANGE, "markersize": 5.5, "zorder": 2.5}
        marks[label] = drawing.marks(axes, steps[clipped], norm[clipped], "v", **look)
    if dropped.any():
        # At the bottom, because a step that dropped all its microbatches has no gradient norm.
        label = f"dropped microbatches (in {dropped.sum():,} of {len(steps):,} steps)"
        marks[label] = _strokes(axes, steps[dropped], 0.02, VERMILLION)
    return marks


def _resumes(axes: Axes, run: RecordedRun) -> dict[str, Artist]:
    """Mark at the top the steps at which training was resumed."""
    steps = run.column("global_step")[run.column("resumed") > 0]
    if not steps.size:
        return {}
    label = f"resumed ({steps.size:,} time{'s' * (steps.size > 1)})"
    return {label: _strokes(axes, steps, 0.98, PURPLE)}


def _strokes(axes: Axes, steps: FloatArray, height: float, colour: str) -> Line2D:
    """Draw short vertical strokes at a share of the chart's height."""
    look = {"color": colour, "markersize": 12, "markeredgewidth": 2}
    heights, transform = np.full(steps.size, height), axes.get_xaxis_transform()
    return drawing.marks(axes, steps, heights, "|", **look, transform=transform)


def _steps_and_median(axes: Axes, x: FloatArray, y: FloatArray) -> dict[str, Artist]:
    return {
        "each step": drawing.faint_line(axes, x, y),
        "running median": drawing.line(
            axes, *recorded_run.running_median(x, y, len(y)), color=BLUE, linewidth=2
        ),
    }


def throughput_chart(run: RecordedRun) -> Figure:
    """Training tokens per second of each step."""
    title = f"{run.name}: throughput"
    figure, (axes,) = drawing.new_chart(title, "step", "training tokens per second")
    lines = _steps_and_median(axes, run.column("global_step"), run.column("tokens_per_second"))
    drawing.throughput_axis(axes, [np.asarray(axes.get_lines()[-1].get_ydata(), dtype=float)])
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines | _resumes(axes, run))
    return figure


RUN_CHARTS: dict[str, Callable[[RecordedRun], Figure]] = {
    "loss-chart.png": loss_chart,
    "learning-rate-chart.png": learning_rate_chart,
    "gradient-norm-chart.png": gradient_norm_chart,
    "throughput-chart.png": throughput_chart,
}


if __name__ == "__main__":
    try:
        draw_run(Path(sys.argv[1]))
    except UserError as error:
        sys.exit(str(error))

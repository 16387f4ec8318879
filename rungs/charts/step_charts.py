"""Charts of every kind of run (learning rate, gradient norm, throughput); shared helpers."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from rungs.charts import drawing
from rungs.charts.drawing import BLACK, BLUE, ORANGE, PURPLE, VERMILLION
from rungs.common.shown_text import counted
from rungs.config.optimization_config import OptimizationConfig
from rungs.run import recorded_run
from rungs.run.recorded_run import FloatArray, RecordedPolicyRun, RecordedSteps

_MANY = 0.1
"""Largest share of marked steps for which markers are drawn; more would hide the line."""
_STRETCHES = 60
AnySteps = RecordedSteps[OptimizationConfig]
Lines = dict[str, Artist]
"""Artists of a chart by their name in the legend."""


def steps_chart(
    run: AnySteps,
    title: str,
    y_label: str,
    draw: Callable[[Axes], Lines],
    scale: Callable[[Axes], object] | None = None,
) -> Figure:
    """Return a chart over the steps of a run. `draw` draws, and returns the entries of the legend;
    `scale` sets the limits and ticks of the y axis."""
    figure, (axes,) = drawing.new_chart(f"{run.name}: {title}", "step", y_label)
    lines = draw(axes)
    if scale is not None:
        scale(axes)
    drawing.step_axis(axes, run)
    if lines:
        drawing.legend(figure, lines)
    return figure


def median_line(axes: Axes, run: AnySteps, values: FloatArray, **look: Any) -> Line2D:
    """Draw the running median of a value of each step."""
    median = recorded_run.running_median(run.column("global_step"), values, len(values))
    return drawing.line(axes, *median, **look)


def steps_and_median(axes: Axes, run: AnySteps, field: str) -> Lines:
    """Draw a value of each step and its running median."""
    values = run.column(field)
    return {
        "each step": drawing.faint_line(axes, run.column("global_step"), values),
        "running median": median_line(axes, run, values, color=BLUE, linewidth=2),
    }


def learning_rate_chart(run: AnySteps) -> Figure:
    """The learning rate of each step."""

    def draw(axes: Axes) -> Lines:
        curve = run.column("global_step"), run.column("learning_rate")
        drawing.line(axes, *curve, color=BLUE, linewidth=2)
        return resumes(axes, run)

    train = run.config.train
    title = f"learning rate ({train.optimizer}, {train.schedule.replace('_', ' ')} schedule)"
    return steps_chart(run, title, "learning rate", draw, drawing.zero_based_axis)


def gradient_norm_chart(run: AnySteps) -> Figure:
    """The gradient norm of each step before clipping. Marks steps that dropped microbatches or were
    clipped; if many were clipped, shows their share instead."""

    def draw(axes: Axes) -> Lines:
        lines = steps_and_median(axes, run, "gradient_norm")
        if limit := run.config.train.clipping_max_norm:
            lines[f"clipping at {limit:g}"] = axes.axhline(limit, color=BLACK, linestyle="--")
        return lines | _marked_steps(axes, run) | resumes(axes, run)

    title = "gradient norm before clipping"
    return steps_chart(run, title, "global gradient norm", draw, drawing.log_axis)


def _marked_steps(axes: Axes, run: AnySteps) -> Lines:
    steps, norm = run.column("global_step"), run.column("gradient_norm")
    clipped, dropped = run.column("clipped") > 0, run.column("dropped_microbatches") > 0
    marks: Lines = {}
    if clipped.any():
        label = f"clipped ({clipped.sum():,} of {len(steps):,} steps)"
        if clipped.mean() > _MANY:
            marks[label] = _share_line(axes, steps, clipped, "share of clipped steps")
        else:
            look: dict[str, Any] = {"color": ORANGE, "markersize": 5.5, "zorder": 2.5}
            marks[label] = drawing.marks(axes, steps[clipped], norm[clipped], "v", **look)
    if dropped.any():
        # At the bottom, because a step that dropped all its microbatches has no gradient norm.
        label = f"dropped microbatches (in {dropped.sum():,} of {len(steps):,} steps)"
        marks[label] = strokes(axes, steps[dropped], 0.02, VERMILLION)
    return marks


def _share_line(axes: Axes, steps: FloatArray, is_marked: NDArray[np.bool_], name: str) -> Line2D:
    """Draw the share of marked steps around each step, with an axis of its own."""
    shares = axes.twinx()
    shares.set_ylim(0, 1.02)
    shares.yaxis.set_major_formatter(PercentFormatter(1))
    shares.set_ylabel(name)
    shares.grid(visible=False)
    length = -(-len(steps) // _STRETCHES)
    x, y = recorded_run.binned_means(steps, is_marked.astype(float), length)
    return drawing.line(shares, x, y, color=ORANGE, linewidth=2)


def resumes(axes: Axes, run: AnySteps) -> Lines:
    """Mark at the top the steps at which training was resumed."""
    steps = run.column("global_step")[run.column("resumed") > 0]
    if not steps.size:
        return {}
    return {f"resumed ({counted(steps.size, 'time')})": strokes(axes, steps, 0.98, PURPLE)}


def strokes(axes: Axes, steps: FloatArray, height: float, colour: str) -> Line2D:
    """Draw short vertical strokes at a share of the chart's height."""
    look = {"color": colour, "markersize": 12, "markeredgewidth": 2}
    heights, transform = np.full(steps.size, height), axes.get_xaxis_transform()
    return drawing.marks(axes, steps, heights, "|", **look, transform=transform)


def throughput_chart(run: AnySteps) -> Figure:
    """Tokens per second of each step: trained on, or sampled in reinforcement learning."""

    def draw(axes: Axes) -> Lines:
        lines = steps_and_median(axes, run, "tokens_per_second")
        median = axes.get_lines()[-1].get_ydata()
        drawing.throughput_axis(axes, [np.asarray(median, dtype=float)])
        return lines | resumes(axes, run)

    kind = "sampled" if isinstance(run, RecordedPolicyRun) else "training"
    return steps_chart(run, "throughput", f"{kind} tokens per second", draw)


STEP_CHARTS: dict[str, Callable[[AnySteps], Figure]] = {
    "learning-rate-chart.png": learning_rate_chart,
    "gradient-norm-chart.png": gradient_norm_chart,
    "throughput-chart.png": throughput_chart,
}

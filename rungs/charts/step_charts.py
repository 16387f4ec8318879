"""Charts that runs of every kind have: learning rate, gradient norm, throughput."""

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
from rungs.common.text_table import counted
from rungs.config.optimization_config import OptimizationConfig
from rungs.run import recorded_run
from rungs.run.recorded_run import FloatArray, RecordedPolicyRun, RecordedSteps

_MANY = 0.1
"""Share of marked steps from which markers would hide the line."""
_STRETCHES = 60
AnySteps = RecordedSteps[OptimizationConfig]


def learning_rate_chart(run: AnySteps) -> Figure:
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
    if marked := resumes(axes, run):
        drawing.legend(figure, marked)
    return figure


def gradient_norm_chart(run: AnySteps) -> Figure:
    """The gradient norm of each step before clipping, with dropped steps marked, and clipped ones,
    too, or their share if they are many."""
    title = f"{run.name}: gradient norm before clipping"
    figure, (axes,) = drawing.new_chart(title, "step", "global gradient norm")
    lines = steps_and_median(axes, run.column("global_step"), run.column("gradient_norm"))
    if limit := run.config.train.clipping_max_norm:
        lines[f"clipping at {limit:g}"] = axes.axhline(limit, color=BLACK, linestyle="--")
    lines |= _marked_steps(axes, run) | resumes(axes, run)
    drawing.log_axis(axes)
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines)
    return figure


def _marked_steps(axes: Axes, run: AnySteps) -> dict[str, Artist]:
    steps, norm = run.column("global_step"), run.column("gradient_norm")
    clipped, dropped = run.column("clipped") > 0, run.column("dropped_microbatches") > 0
    marks: dict[str, Artist] = {}
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
    """Draw in what share of the steps around each something happened, with an axis of its own."""
    shares = axes.twinx()
    shares.set_ylim(0, 1.02)
    shares.yaxis.set_major_formatter(PercentFormatter(1))
    shares.set_ylabel(name)
    shares.grid(visible=False)
    length = -(-len(steps) // _STRETCHES)
    x, y = recorded_run.binned_means(steps, is_marked.astype(float), length)
    return drawing.line(shares, x, y, color=ORANGE, linewidth=2)


def resumes(axes: Axes, run: AnySteps) -> dict[str, Artist]:
    """Mark at the top the steps at which training was resumed."""
    steps = run.column("global_step")[run.column("resumed") > 0]
    if not steps.size:
        return {}
    label = f"resumed ({counted(steps.size, 'time')})"
    return {label: strokes(axes, steps, 0.98, PURPLE)}


def strokes(axes: Axes, steps: FloatArray, height: float, colour: str) -> Line2D:
    """Draw short vertical strokes at a share of the chart's height."""
    look = {"color": colour, "markersize": 12, "markeredgewidth": 2}
    heights, transform = np.full(steps.size, height), axes.get_xaxis_transform()
    return drawing.marks(axes, steps, heights, "|", **look, transform=transform)


def steps_and_median(axes: Axes, x: FloatArray, y: FloatArray) -> dict[str, Artist]:
    """Draw a value of each step and its running median."""
    return {
        "each step": drawing.faint_line(axes, x, y),
        "running median": drawing.line(
            axes, *recorded_run.running_median(x, y, len(y)), color=BLUE, linewidth=2
        ),
    }


def throughput_chart(run: AnySteps) -> Figure:
    """Tokens per second of each step; in reinforcement learning those that were sampled."""
    title = f"{run.name}: throughput"
    kind = "sampled" if isinstance(run, RecordedPolicyRun) else "training"
    figure, (axes,) = drawing.new_chart(title, "step", f"{kind} tokens per second")
    lines = steps_and_median(axes, run.column("global_step"), run.column("tokens_per_second"))
    drawing.throughput_axis(axes, [np.asarray(axes.get_lines()[-1].get_ydata(), dtype=float)])
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines | resumes(axes, run))
    return figure


STEP_CHARTS: dict[str, Callable[[AnySteps], Figure]] = {
    "learning-rate-chart.png": learning_rate_chart,
    "gradient-norm-chart.png": gradient_norm_chart,
    "throughput-chart.png": throughput_chart,
}

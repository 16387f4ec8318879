"""Charts of a run of reinforcement learning. The loss is not among them: on the step that sampled
the texts its value says nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rungs.charts import drawing
from rungs.charts.drawing import BLACK, BLUE, ORANGE, PALE, PURPLE, SKY_BLUE, VERMILLION
from rungs.charts.step_charts import resumes, steps_and_median
from rungs.run import recorded_run
from rungs.run.recorded_run import FloatArray, RecordedPolicyRun

_BARS = 60
"""Of the chart of groups; more would be too narrow to see."""


def reward_chart(run: RecordedPolicyRun) -> Figure:
    """Reward of training, and pass@1 and pass@k on the held-out items beside those of the start."""
    figure, (axes,) = drawing.new_chart(
        f"{run.name}: reward and held-out pass@k", "step", "mean reward, pass@k"
    )
    steps = run.column("global_step")
    lines = steps_and_median(axes, steps, run.column("reward"))
    lines = {f"training reward, {name}": line for name, line in lines.items()}
    if len(run.rewards) > 1:
        for (name, values), color in zip(run.rewards.items(), drawing.COLOURS, strict=False):
            median = recorded_run.running_median(steps, values, len(values))
            lines[f"reward {name}"] = drawing.line(axes, *median, color=color)
    lines |= _validations(axes, run)
    lines |= resumes(axes, run)
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines)
    return figure


def _validations(axes: Axes, run: RecordedPolicyRun) -> dict[str, Artist]:
    if not run.validations:
        return {}
    steps = np.array([step for step, _ in run.validations], dtype=float)
    found = [validation for _, validation in run.validations]
    low, high = np.array([validation.pass_at_1_interval for validation in found]).T
    pass_at_1 = np.array([validation.pass_at_1 for validation in found])
    lines: dict[str, Artist] = {
        "pass@1 on held-out items": drawing.line(axes, steps, pass_at_1, color=VERMILLION),
        "its 95% interval": axes.fill_between(steps, low, high, color=VERMILLION, alpha=0.15),
    }
    k = min(max(validation.pass_at) for validation in found)
    if k > 1:
        values = np.array([validation.pass_at[k] for validation in found])
        look: dict[str, Any] = {"color": PURPLE, "linestyle": "--", "marker": "s"}
        lines[f"pass@{k}"] = drawing.line(axes, steps, values, **look)
    if run.validations[0][0] == 0:
        look = {"color": BLACK, "linestyle": ":", "linewidth": 1}
        lines["pass@1 of the start"] = axes.axhline(pass_at_1[0], **look)
    return lines


def groups_chart(run: RecordedPolicyRun) -> Figure:
    """Of each step's prompts, the shares of which all completions are wrong, some, or none."""
    figure, (axes,) = drawing.new_chart(
        f"{run.name}: prompts by their completions", "step", "share of the step's prompts"
    )
    count = run.config.train.prompts_per_step
    names = {
        "all right": ("groups_right", SKY_BLUE),
        "right and wrong": ("groups_mixed", ORANGE),
        "all wrong": ("groups_wrong", PALE),
    }
    steps, length = run.column("global_step"), -(-len(run) // _BARS)
    lines: dict[str, Artist] = {}
    below: FloatArray | float = 0.0
    for name, (field, color) in names.items():
        spans = recorded_run.by_interval(steps, run.column(field) / count, length)
        above = below + spans.mean
        lines[name] = axes.stairs(above, spans.edges, baseline=below, fill=True, color=color)
        below = above
    axes.set_ylim(0, 1)
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines)
    return figure


def completions_chart(run: RecordedPolicyRun) -> Figure:
    """Length of the completions, and the share of them that was cut off."""
    most = run.config.train.max_new_tokens
    figure, (axes,) = drawing.new_chart(
        f"{run.name}: length of completions", "step", "share of max_new_tokens, of completions"
    )
    steps = run.column("global_step")
    lines = {
        f"mean length ÷ {most:,} tokens": _median(
            axes, run, run.column("mean_tokens") / most, BLUE
        ),
        "completions cut off at max_new_tokens": _median(
            axes, run, run.column("truncated"), VERMILLION
        ),
    }
    lines |= resumes(axes, run)
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=min(0, steps[0]))
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines)
    return figure


def entropy_chart(run: RecordedPolicyRun) -> Figure:
    """Entropy of the distributions that the tokens are from."""
    figure, (axes,) = drawing.new_chart(f"{run.name}: entropy", "step", "nats per token")
    lines = steps_and_median(axes, run.column("global_step"), run.column("entropy"))
    lines |= resumes(axes, run)
    drawing.zero_based_axis(axes)
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines)
    return figure


def log_prob_chart(run: RecordedPolicyRun) -> Figure:
    """How far apart the log-probabilities of sampling and training are, and the KL divergence from
    the reference."""
    figure, (axes,) = drawing.new_chart(
        f"{run.name}: log-probabilities, sampling against training", "step", "nats per token"
    )
    lines = {
        "largest |Δ log-probability|": _median(
            axes, run, run.column("largest_log_prob_gap"), VERMILLION
        ),
        "mean |Δ log-probability|": _median(axes, run, run.column("log_prob_gap"), BLUE),
    }
    if np.isfinite(run.column("kl")).any():
        lines["KL divergence from the reference"] = _median(axes, run, run.column("kl"), PURPLE)
    drawing.log_axis(axes)
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines | resumes(axes, run))
    return figure


def ratios_chart(run: RecordedPolicyRun) -> Figure:
    """Shares of tokens whose probability is exactly the same, and whose ratio is clipped."""
    figure, (axes,) = drawing.new_chart(
        f"{run.name}: training against sampling", "step", "share of tokens"
    )
    lines = {"equal to the last bit in both": _median(axes, run, run.column("exact_ratios"), BLUE)}
    if np.isfinite(run.column("clipped_ratios")).any():
        lines["clipped in the last update"] = _median(
            axes, run, run.column("clipped_ratios"), VERMILLION
        )
    axes.set_ylim(0, 1.02)
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines | resumes(axes, run))
    return figure


def seconds_chart(run: RecordedPolicyRun) -> Figure:
    """Seconds of each phase of a step."""
    figure, (axes,) = drawing.new_chart(f"{run.name}: time of a step", "step", "seconds")
    names = {
        "sampling": ("sampling_seconds", BLUE),
        "verifying": ("verifying_seconds", ORANGE),
        "updating": ("updating_seconds", PURPLE),
    }
    lines = {
        name: _median(axes, run, run.column(field), color) for name, (field, color) in names.items()
    }
    drawing.zero_based_axis(axes)
    drawing.step_axis(axes, run)
    drawing.legend(figure, lines)
    return figure


def _median(axes: Axes, run: RecordedPolicyRun, values: FloatArray, color: str) -> Artist:
    """Draw the running median of a value of each step."""
    curve = recorded_run.running_median(run.column("global_step"), values, len(values))
    return drawing.line(axes, *curve, color=color, linewidth=2)


POLICY_CHARTS: dict[str, Callable[[Any], Figure]] = {
    "reward-chart.png": reward_chart,
    "groups-chart.png": groups_chart,
    "completions-chart.png": completions_chart,
    "entropy-chart.png": entropy_chart,
    "log-prob-chart.png": log_prob_chart,
    "ratios-chart.png": ratios_chart,
    "seconds-chart.png": seconds_chart,
}

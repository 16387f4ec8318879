"""Charts of a reinforcement learning run. There is none of the loss: on the step that sampled the
texts its value means nothing."""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rungs.charts import drawing
from rungs.charts.drawing import BLACK, BLUE, ORANGE, PALE, PURPLE, SKY_BLUE, VERMILLION
from rungs.charts.step_charts import Lines, median_line, resumes, steps_and_median, steps_chart
from rungs.run import recorded_run
from rungs.run.recorded_run import FloatArray, RecordedPolicyRun

_BARS = 60
"""Most bars in the chart of groups; with more they are too narrow to see."""


def reward_chart(run: RecordedPolicyRun) -> Figure:
    """Reward of training, and pass@1 and pass@k on the held-out items, now and at the start."""

    def draw(axes: Axes) -> Lines:
        lines = steps_and_median(axes, run, "reward")
        lines = {f"training reward, {name}": line for name, line in lines.items()}
        if len(run.rewards) > 1:
            for (name, values), color in zip(run.rewards.items(), drawing.COLOURS, strict=False):
                lines[f"reward {name}"] = median_line(axes, run, values, color=color)
        return lines | _validations(axes, run) | resumes(axes, run)

    return steps_chart(run, "reward and held-out pass@k", "mean reward, pass@k", draw)


def _validations(axes: Axes, run: RecordedPolicyRun) -> Lines:
    if not run.validations:
        return {}
    steps = np.array([step for step, _ in run.validations], dtype=float)
    found = [validation for _, validation in run.validations]
    low, high = np.array([validation.pass_at_1_interval for validation in found]).T
    pass_at_1 = np.array([validation.pass_at_1 for validation in found])
    lines: Lines = {
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
    """Shares of each step's prompts whose completions are all right, all wrong, or mixed."""
    columns = {
        "all right": (run.column("groups_right"), SKY_BLUE),
        "right and wrong": (run.column("groups_mixed"), ORANGE),
        "all wrong": (run.column("groups_wrong"), PALE),
    }

    def draw(axes: Axes) -> Lines:
        steps, length = run.column("global_step"), -(-len(run) // _BARS)
        lines: Lines = {}
        below: FloatArray | float = 0.0
        for name, (groups, color) in columns.items():
            shares = groups / run.config.train.prompts_per_step
            spans = recorded_run.by_interval(steps, shares, length)
            above = below + spans.mean
            lines[name] = axes.stairs(above, spans.edges, baseline=below, fill=True, color=color)
            below = above
        return lines

    title, y_label = "prompts by their completions", "share of the step's prompts"
    return steps_chart(run, title, y_label, draw, lambda axes: axes.set_ylim(0, 1))


def completions_chart(run: RecordedPolicyRun) -> Figure:
    """Length of the completions, and the share of them that was cut off."""
    most = run.config.train.max_new_tokens
    columns = {
        f"mean length ÷ {most:,} tokens": (run.column("mean_tokens") / most, BLUE),
        "completions cut off at max_new_tokens": (run.column("truncated"), VERMILLION),
    }

    def scale(axes: Axes) -> None:
        axes.set_ylim(0, 1.02)
        axes.set_xlim(left=min(0, run.column("global_step")[0]))

    y_label = "share of max_new_tokens, of completions"
    return _median_chart(run, "length of completions", y_label, columns, scale)


def entropy_chart(run: RecordedPolicyRun) -> Figure:
    """Entropy of the distributions that tokens are sampled from."""

    def draw(axes: Axes) -> Lines:
        return steps_and_median(axes, run, "entropy") | resumes(axes, run)

    return steps_chart(run, "entropy", "nats per token", draw, drawing.zero_based_axis)


def log_prob_chart(run: RecordedPolicyRun) -> Figure:
    """Difference in log-probability of sampling and training, and KL from the reference."""
    columns = {
        "largest |Δ log-probability|": (run.column("largest_log_prob_gap"), VERMILLION),
        "mean |Δ log-probability|": (run.column("log_prob_gap"), BLUE),
    }
    if np.isfinite(kl := run.column("kl")).any():
        columns["KL divergence from the reference"] = (kl, PURPLE)
    title = "log-probabilities, sampling against training"
    return _median_chart(run, title, "nats per token", columns, drawing.log_axis)


def ratios_chart(run: RecordedPolicyRun) -> Figure:
    """Shares of tokens with exactly equal probabilities, and of tokens with a clipped ratio."""
    columns = {"equal to the last bit in both": (run.column("exact_ratios"), BLUE)}
    if np.isfinite(clipped := run.column("clipped_ratios")).any():
        columns["clipped in the last update"] = (clipped, VERMILLION)
    title, y_label = "training against sampling", "share of tokens"
    return _median_chart(run, title, y_label, columns, lambda axes: axes.set_ylim(0, 1.02))


def seconds_chart(run: RecordedPolicyRun) -> Figure:
    """Seconds of each phase of a step."""
    columns = {
        "sampling": (run.column("sampling_seconds"), BLUE),
        "verifying": (run.column("verifying_seconds"), ORANGE),
        "updating": (run.column("updating_seconds"), PURPLE),
    }
    title, scale = "time of a step", drawing.zero_based_axis
    return _median_chart(run, title, "seconds", columns, scale, marks_resumes=False)


def _median_chart(
    run: RecordedPolicyRun,
    title: str,
    y_label: str,
    columns: dict[str, tuple[FloatArray, str]],
    scale: Callable[[Axes], object],
    *,
    marks_resumes: bool = True,
) -> Figure:
    """Return a chart of running medians. `columns` has, by name, a value for each step and the
    colour of its median."""

    def draw(axes: Axes) -> Lines:
        lines: Lines = {
            name: median_line(axes, run, values, color=color, linewidth=2)
            for name, (values, color) in columns.items()
        }
        return lines | resumes(axes, run) if marks_resumes else lines

    return steps_chart(run, title, y_label, draw, scale)


POLICY_CHARTS: dict[str, Callable[[Any], Figure]] = {
    "reward-chart.png": reward_chart,
    "groups-chart.png": groups_chart,
    "completions-chart.png": completions_chart,
    "entropy-chart.png": entropy_chart,
    "log-prob-chart.png": log_prob_chart,
    "ratios-chart.png": ratios_chart,
    "seconds-chart.png": seconds_chart,
}

"""Charts of one run. To add one, write a function and list it in `TRAINING_CHARTS`,
`PREFERENCE_CHARTS`, `POLICY_CHARTS` or, for every kind of run, `STEP_CHARTS`. Reinforcement
learning has no chart of the loss: on the step that sampled the texts its value means nothing.

`python -m rungs.report.run_charts RUN` redraws them while training continues."""

import itertools
import logging
import sys
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rungs.common.errors import RunFailure, UserError, reason
from rungs.common.helper_process import ENDED, KILLED, receive
from rungs.config.run_config import load_run
from rungs.data import catalog, overlap
from rungs.report import drawing
from rungs.report.drawing import BLACK, BLUE, GREEN, ORANGE, PALE, PURPLE, SKY_BLUE, VERMILLION
from rungs.run.folder import RunFolder
from rungs.run.recorded_run import Curve, RecordedPolicyRun, RecordedRun, finite_points, kind_of
from rungs.run.step_table import BestStep, FloatArray

Charts = dict[str, Callable[[Any], Figure]]
_FEW, _MARKS = 10, 30
"""Most validations that are drawn as points alone; most points on a line."""
_LOSS_UNITS = {
    "next_token": "nats per token",
    "multi_token": "nats per token; in training, with the module's",
    "masked_diffusion": "nats per token; an upper bound",
    "distill": "nats per token; in training, divergence from the teacher",
    "kto": "per answer",
}
"""By objective; of paired preferences, a loss is of a pair."""
_BARS = 60
"""Most bars in the chart of groups; with more they are too narrow to see."""


def draw_run(
    run_folder: Path, output_folder: Path | None = None, chart_style: str | None = None
) -> list[Path]:
    """Draw the charts of a run from its metrics and configs, into its folder or another, and return
    the files written: none if no step has been recorded yet. `chart_style` is one of
    `drawing.STYLES`; as `train.json` says if None. Matplotlib's settings change for the whole
    process, so draw in one thread only. Raises UserError if a config is wrong, or a chart cannot be
    written."""
    kind, charts = _kind_of(run_folder)
    run: drawing.AnySteps = kind.load(run_folder)
    if not len(run):
        return []
    with drawing.use_style(chart_style or run.config.train.chart_style):
        # A run folder that was deleted while its charts are drawn stays deleted.
        creates = output_folder is not None
        return drawing.write_all(charts, run, output_folder or run_folder, creates=creates)


def _kind_of(run_folder: Path) -> tuple[Any, Charts]:
    """Return the type of a run, and its charts. Raises UserError if a config is wrong."""
    if kind_of(run_folder) is RecordedPolicyRun:
        return RecordedPolicyRun, POLICY_CHARTS | STEP_CHARTS
    learns_preferences = load_run(run_folder).train.learns_preferences
    charts = PREFERENCE_CHARTS if learns_preferences else {}
    return RecordedRun, TRAINING_CHARTS | charts | STEP_CHARTS


def loss_chart(run: RecordedRun) -> Figure:
    """Training and validation loss over the steps, with the best step."""
    unit = _LOSS_UNITS.get(run.config.train.objective, "per pair")
    figure, (axes,) = drawing.new_chart(f"{run.name}: loss", "step", f"loss ({unit})")
    steps = run.column("global_step")
    lines = drawing.trend(axes, run, "train_loss", "training, ")
    validation = finite_points(steps, run.column("validation_loss"))
    if validation[0].size:
        lines["validation"] = _held_out(axes, validation, VERMILLION)
    averaged = finite_points(steps, run.column("ema_validation_loss"))
    if averaged[0].size:
        lines["validation, averaged weights"] = _held_out(axes, averaged, GREEN, "o")
    lines |= _losses_of_datasets(axes, run)
    lines |= _spikes(axes, run)
    drawing.log_axis(axes)
    drawing.step_axis(axes, run)
    if run.best_step:
        lines["best step"] = _mark_best(axes, run.best_step)
    lines |= drawing.resumes(axes, run)
    drawing.legend(figure, lines, overlaps([run]))
    return figure


def _held_out(
    axes: Axes, curve: Curve, color: str, marker: str = "s", linestyle: str = "-"
) -> Line2D:
    """Draw what validations measured: a line or, if they are few, points alone, as straight lines
    between them would show losses that nobody measured."""
    is_few, every = len(curve[0]) <= _FEW, -(-len(curve[0]) // _MARKS)
    look: dict[str, Any] = {"color": color, "marker": marker, "markeredgecolor": "white"}
    look |= {"markersize": 8, "linestyle": ""} if is_few else {"linestyle": linestyle}
    return drawing.line(axes, *curve, linewidth=1.5, markevery=every, **look)


def overlaps(runs: list[RecordedRun]) -> list[str]:
    """Return notes on validation data that is also in the training data, as far as measured."""
    names = dict.fromkeys(
        name
        for run in runs
        for name in (*run.config.train.datasets, *run.config.train.validation_datasets)
    )
    place = catalog.find_datasets_dir()
    return overlap.notes({name: catalog.dataset_folder(name, place) for name in names})


def _losses_of_datasets(axes: Axes, run: RecordedRun) -> drawing.Lines:
    """Draw the validation loss on each of several datasets."""
    looks = zip(itertools.cycle(drawing.COLOURS[2:]), itertools.cycle(drawing.MARKERS[2:]))
    steps = run.column("global_step")
    lines: drawing.Lines = {}
    losses = run.steps.parts("validation_losses").items()
    for (name, own), look in zip(losses, looks, strict=False):
        curve = finite_points(steps, own)
        lines[f"validation on {name}"] = _held_out(axes, curve, *look, ":")
    return lines


def _spikes(axes: Axes, run: RecordedRun) -> drawing.Lines:
    spikes, steps = run.steps.texts.get("spike", {}), run.column("global_step")
    if not spikes:
        return {}
    skipped = sum(kind == "skipped" for kind in spikes.values())
    label = f"loss spikes ({len(spikes):,} steps, {skipped:,} skipped)"
    at = np.isin(steps, [*spikes])
    look: dict[str, Any] = {"color": VERMILLION, "markersize": 9, "markeredgewidth": 2}
    return {label: axes.plot(steps[at], run.column("train_loss")[at], "x", **look)[0]}


def _mark_best(axes: Axes, best: BestStep) -> Line2D:
    """Draw a star at the best step, and its loss above the chart, where it covers no data."""
    kind = "training" if best.field == "train_loss" else "validation"
    step, loss, (left, right) = best.step, best.value, axes.get_xlim()
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


TRAINING_CHARTS: Charts = {"loss-chart.png": loss_chart}


def _share_axis(axes: Axes) -> None:
    axes.set_ylim(-0.02, 1.02)


def _preference_chart(
    title: str,
    y_label: str,
    fields: dict[str, str],
    run: RecordedRun,
    scale: Callable[[Axes], object] | None = None,
) -> Figure:
    """Return a chart of figures of preferences, a colour for each: in training and held-out."""

    def draw(axes: Axes) -> drawing.Lines:
        steps, lines = run.column("global_step"), {}
        for field, color in fields.items():
            name = field.replace("_log_prob", "").replace("_", " ")
            values = run.column(f"preferences.{field}")
            drawing.faint_line(axes, steps, values)
            lines[name] = drawing.median_line(axes, run, values, color)
            held_out = finite_points(steps, run.column(f"validation_preferences.{field}"))
            if held_out[0].size:
                lines[f"{name}, held-out"] = _held_out(axes, held_out, color)
        return lines | drawing.resumes(axes, run)

    return drawing.steps_chart(run, title, y_label, draw, scale)


PREFERENCE_CHARTS: Charts = {
    "margin-chart.png": partial(_preference_chart, "margin", "β × nats", {"margin": BLUE}),
    "accuracy-chart.png": partial(
        _preference_chart,
        "accuracy of the preferences",
        "share of the pairs or answers",
        {"accuracy": BLUE},
        scale=_share_axis,
    ),
    # If the chosen answer's falls, too, the model moves to texts that nobody preferred.
    "answers-chart.png": partial(
        _preference_chart,
        "log-probability of the answers",
        "nats per answer",
        {"chosen_log_prob": BLUE, "rejected_log_prob": ORANGE},
    ),
    "kl-chart.png": partial(
        _preference_chart,
        "how far answers are from the reference",
        "nats per answer",
        {"kl": PURPLE},
    ),
}


def learning_rate_chart(run: drawing.AnySteps) -> Figure:
    """The learning rate of each step."""

    def draw(axes: Axes) -> drawing.Lines:
        curve = run.column("global_step"), run.column("learning_rate")
        drawing.line(axes, *curve, color=BLUE, linewidth=2)
        return drawing.resumes(axes, run)

    train = run.config.train
    title = f"learning rate ({train.optimizer}, {train.schedule.replace('_', ' ')} schedule)"
    return drawing.steps_chart(run, title, "learning rate", draw, drawing.zero_based_axis)


def gradient_norm_chart(run: drawing.AnySteps) -> Figure:
    """The gradient norm of each step before clipping. Marks steps that dropped microbatches, were
    clipped, or have a norm of zero."""

    def draw(axes: Axes) -> drawing.Lines:
        lines = drawing.trend(axes, run, "gradient_norm")
        if limit := run.config.train.clipping_max_norm:
            lines[f"clipping at {limit:g}"] = axes.axhline(limit, color=BLACK, linestyle="--")
        return lines | _marked_steps(axes, run) | drawing.resumes(axes, run)

    title = "gradient norm before clipping"
    return drawing.steps_chart(run, title, "global gradient norm", draw, drawing.log_axis)


def _marked_steps(axes: Axes, run: drawing.AnySteps) -> drawing.Lines:
    steps = run.column("global_step")
    clipped, dropped = run.column("clipped") > 0, run.column("dropped_microbatches") > 0
    marks: drawing.Lines = {}
    is_zero = run.column("gradient_norm") == 0
    if is_zero.any():
        label = f"zero ({is_zero.sum():,} of {len(steps):,} steps)"
        marks[label] = drawing.strokes(axes, steps[is_zero], 0.02, BLACK)
    if clipped.any():
        label = f"clipped ({clipped.sum():,} of {len(steps):,} steps)"
        marks[label] = drawing.strokes(axes, steps[clipped], 0.06, ORANGE)
    if dropped.any():
        # At the bottom, because a step that dropped all its microbatches has no gradient norm.
        label = f"dropped microbatches (in {dropped.sum():,} of {len(steps):,} steps)"
        marks[label] = drawing.strokes(axes, steps[dropped], 0.02, VERMILLION)
    return marks


def throughput_chart(run: drawing.AnySteps) -> Figure:
    """Tokens per second of each step: trained on, or sampled in reinforcement learning."""

    def draw(axes: Axes) -> drawing.Lines:
        lines = drawing.trend(axes, run, "tokens_per_second")
        medians = np.asarray(axes.get_lines()[-1].get_ydata(), dtype=float)
        # from 0, so that a stall is visible, to above the medians: one step may be an outlier
        axes.set_ylim(0, 1.2 * np.fmax.reduce(medians, initial=0) or 1)
        axes.yaxis.set_major_formatter(drawing.format_number)
        return lines | drawing.resumes(axes, run)

    kind = "sampled" if isinstance(run, RecordedPolicyRun) else "training"
    return drawing.steps_chart(run, "throughput", f"{kind} tokens per second", draw)


STEP_CHARTS: dict[str, Callable[[drawing.AnySteps], Figure]] = {
    "learning-rate-chart.png": learning_rate_chart,
    "gradient-norm-chart.png": gradient_norm_chart,
    "throughput-chart.png": throughput_chart,
}


_PART_COLOURS = (GREEN, ORANGE, BLACK, SKY_BLUE)
"""Of parts of the reward, over and over: others than those of the chart's other lines."""


def reward_chart(run: RecordedPolicyRun) -> Figure:
    """Reward of training, and pass@1 and pass@k on the held-out items, now and at the start."""

    def draw(axes: Axes) -> drawing.Lines:
        lines = drawing.trend(axes, run, "reward", "training reward, ")
        rewards = run.steps.parts("rewards")
        if len(rewards) > 1:
            for (name, values), color in zip(rewards.items(), itertools.cycle(_PART_COLOURS)):
                lines[f"reward {name}"] = drawing.median_line(axes, run, values, color)
        return lines | _validations(axes, run) | drawing.resumes(axes, run)

    return drawing.steps_chart(run, "reward and held-out pass@k", "mean reward, pass@k", draw)


def _validations(axes: Axes, run: RecordedPolicyRun) -> drawing.Lines:
    if not (validations := run.validations):
        return {}
    steps = np.array([step for step, _ in validations], dtype=float)
    found = [validation for _, validation in validations]
    low, high = np.array([validation.pass_at_1_interval for validation in found]).T
    pass_at_1 = np.array([validation.pass_at_1 for validation in found])
    lines: drawing.Lines = {
        "pass@1 on held-out items": drawing.line(axes, steps, pass_at_1, color=VERMILLION),
        "95% interval of pass@1": axes.fill_between(steps, low, high, color=VERMILLION, alpha=0.15),
    }
    k = min(max(validation.pass_at) for validation in found)
    if k > 1:
        values = np.array([validation.pass_at[k] for validation in found])
        look: dict[str, Any] = {"color": PURPLE, "linestyle": "--", "marker": "s"}
        lines[f"pass@{k}"] = drawing.line(axes, steps, values, **look)
    if steps[0] < 0:
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

    def draw(axes: Axes) -> drawing.Lines:
        steps, length = run.column("global_step"), -(-len(run) // _BARS)
        lines: drawing.Lines = {}
        below: FloatArray | float = 0.0
        for name, (groups, color) in columns.items():
            shares = groups / run.config.train.prompts_per_step
            of = drawing.in_stretches(steps, shares, length, np.mean)
            lines[name] = axes.bar(of.x, of.middle, length, below, color=color).patches[0]
            below = below + of.middle
        return lines

    title, y_label = "prompts by their completions", "share of the step's prompts"
    return drawing.steps_chart(run, title, y_label, draw, lambda axes: axes.set_ylim(0, 1))


def completions_chart(run: RecordedPolicyRun) -> Figure:
    """Length of the completions, and the share of them that was cut off."""
    most = run.config.train.max_new_tokens

    def draw(axes: Axes) -> drawing.Lines:
        lengths, cut_off = run.column("mean_tokens") / most, run.column("truncated")
        return {
            f"mean length ÷ {most:,} tokens": drawing.median_line(axes, run, lengths, BLUE),
            "completions cut off at max_new_tokens": drawing.median_line(
                axes, run, cut_off, VERMILLION
            ),
            **drawing.resumes(axes, run),
        }

    title, y_label = "length of completions", "share of max_new_tokens, of completions"
    return drawing.steps_chart(run, title, y_label, draw, drawing.zero_based_axis)


def entropy_chart(run: RecordedPolicyRun) -> Figure:
    """Entropy of the distributions that tokens are sampled from."""

    def draw(axes: Axes) -> drawing.Lines:
        return drawing.trend(axes, run, "entropy") | drawing.resumes(axes, run)

    return drawing.steps_chart(run, "entropy", "nats per token", draw, drawing.zero_based_axis)


def _median_chart(
    title: str,
    y_label: str,
    columns: dict[str, tuple[str, str]],
    scale: Callable[[Axes], object],
    run: RecordedPolicyRun,
) -> Figure:
    """Return a chart of running medians. `columns` has, by name in the legend, a metric of each
    step and the colour of its median. Metrics without numbers are left out."""

    def draw(axes: Axes) -> drawing.Lines:
        lines: drawing.Lines = {
            name: drawing.median_line(axes, run, run.column(field), color)
            for name, (field, color) in columns.items()
            if np.isfinite(run.column(field)).any()
        }
        return lines | drawing.resumes(axes, run)

    return drawing.steps_chart(run, title, y_label, draw, scale)


def seconds_chart(run: RecordedPolicyRun) -> Figure:
    """Mean seconds by phase, without the first step of each start, which compiles. A validation
    counts for the step after it."""
    phases = ("sampling", "verifying", "updating")
    parts = {phase: run.column(f"{phase}_seconds") for phase in phases}
    if not run.config.train.staleness:  # with it phases overlap
        parts["the rest, such as validations"] = run.column("step_seconds") - sum(parts.values())
    is_first = (run.column("resumed") > 0) | (run.column("global_step") == 0)

    def draw(axes: Axes) -> drawing.Lines:
        steps, length = run.column("global_step"), drawing.stretch_length(run)
        colors = (BLUE, ORANGE, PURPLE, BLACK)
        lines: drawing.Lines = {}
        for (name, values), color in zip(parts.items(), colors, strict=False):
            values = np.where(is_first, np.nan, values)
            of = drawing.in_stretches(steps, values, length, np.mean)
            lines[name] = drawing.line(axes, of.x, of.middle, color=color, linewidth=2)
        return lines | drawing.resumes(axes, run)

    title, scale = "time of a step, without those that compile", drawing.zero_based_axis
    return drawing.steps_chart(run, title, "seconds", draw, scale)


POLICY_CHARTS: Charts = {
    "reward-chart.png": reward_chart,
    "groups-chart.png": groups_chart,
    "completions-chart.png": completions_chart,
    "entropy-chart.png": entropy_chart,
    "log-prob-chart.png": partial(
        _median_chart,
        "log-probabilities, sampling against training",
        "nats per token",
        {
            "largest |Δ log-probability|": ("largest_log_prob_gap", VERMILLION),
            "mean |Δ log-probability|": ("log_prob_gap", BLUE),
            "KL divergence from the reference": ("kl", PURPLE),
            "KL divergence from the teacher": ("teacher_kl", GREEN),
        },
        drawing.log_axis,
    ),
    # of tokens: those with exactly equal probabilities, and those with a clipped ratio
    "ratios-chart.png": partial(
        _median_chart,
        "training against sampling",
        "share of tokens",
        {
            "equal to the last bit in both": ("exact_ratios", BLUE),
            "clipped in the last update": ("clipped_ratios", VERMILLION),
        },
        _share_axis,
    ),
    "seconds-chart.png": seconds_chart,
}


def main(run: RunFolder, lines: Iterable[str]) -> None:
    """Draw the charts of a run on each request, a line. Requests that arrive while it draws are
    merged. An empty line means that the run has ended."""
    received, new = receive(lines), set[str]()
    while not new & {ENDED, KILLED}:
        new = {received.get()}
        while not received.empty():
            new.add(received.get())
        if KILLED in new or new == {ENDED}:
            return
        try:
            draw_run(run.path)
        except Exception as error:  # the next drawing may work
            kind = "" if isinstance(error, UserError | RunFailure) else f"{type(error).__name__}: "
            print(f"not drawn: {kind}{reason(error)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # stderr goes to the run's log, which should hold only failures.
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    main(RunFolder(Path(sys.argv[1])), sys.stdin)

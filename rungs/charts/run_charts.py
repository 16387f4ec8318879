"""Charts of one run. To add one, write a function and list it in `TRAINING_CHARTS` here or in
`POLICY_CHARTS`; for every kind of run, in `STEP_CHARTS` of `step_charts.py`."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rungs.charts import drawing
from rungs.charts.drawing import BLACK, BLUE, ORANGE, SKY_BLUE, VERMILLION
from rungs.charts.policy_charts import POLICY_CHARTS
from rungs.charts.preference_charts import PREFERENCE_CHARTS
from rungs.charts.step_charts import STEP_CHARTS, AnySteps, Lines, resumes
from rungs.config.run_config import REINFORCE_FILE, config_files, load_run
from rungs.data import catalog, overlap
from rungs.run import recorded_run
from rungs.run.metrics import StepMetrics
from rungs.run.recorded_run import RecordedPolicyRun, RecordedPreferenceRun, RecordedRun

Charts = dict[str, Callable[[Any], Figure]]
FEWEST_INTERVALS, MOST_INTERVALS = 10, 500
"""Intervals of a run in which its loss is drawn: between checkpoints, but within these limits."""


def draw_run(
    run_folder: Path, output_folder: Path | None = None, chart_style: str | None = None
) -> list[Path]:
    """Draw the charts of a run from its metrics and configs, into its folder or another, and return
    the files written: none if no step has been recorded yet. `chart_style` is one of
    `drawing.STYLES`; as `train.json` says if None. Matplotlib's settings change for the whole
    process, so draw in one thread only. Raises UserError if a config is wrong, or a chart cannot be
    written."""
    kind, charts = _kind_of(run_folder)
    run: AnySteps = kind.load(run_folder)
    if not len(run):
        return []
    with drawing.use_style(chart_style or run.config.train.chart_style):
        # A run folder that was deleted while its charts are drawn stays deleted.
        creates = output_folder is not None
        return drawing.write_all(charts, run, output_folder or run_folder, creates=creates)


def _kind_of(run_folder: Path) -> tuple[Any, Charts]:
    """Return the type of a run, and its charts. Raises UserError if a config is wrong."""
    if config_files(run_folder)[1] == REINFORCE_FILE:
        return RecordedPolicyRun, POLICY_CHARTS | STEP_CHARTS
    if load_run(run_folder).train.learns_preferences:
        return RecordedPreferenceRun, TRAINING_CHARTS | PREFERENCE_CHARTS | STEP_CHARTS
    return RecordedRun, TRAINING_CHARTS | STEP_CHARTS


def loss_chart(run: RecordedRun) -> Figure:
    """Training and validation loss over the steps, with the best step."""
    unit = "per pair" if run.config.train.learns_preferences else "nats per token"
    figure, (axes,) = drawing.new_chart(f"{run.name}: loss", "step", f"loss ({unit})")
    steps = run.column("global_step")
    lines = _training_loss(axes, run)
    validation = recorded_run.finite_points(steps, run.column("validation_loss"))
    if validation[0].size:
        look: dict[str, Any] = {"marker": "s", "linestyle": "--", "linewidth": 1.5}
        lines["validation"] = drawing.line(axes, *validation, color=VERMILLION, **look)
    lines |= _losses_of_datasets(axes, run)
    lines |= _spikes(axes, run)
    drawing.log_axis(axes)
    drawing.step_axis(axes, run)
    if run.best_step:
        lines["best step"] = _mark_best(axes, run.best_step)
    lines |= resumes(axes, run)
    drawing.legend(figure, lines, overlaps([run]))
    return figure


def overlaps(runs: list[RecordedRun]) -> list[str]:
    """Return notes on validation data that is also in the training data, as far as measured."""
    names = dict.fromkeys(
        name
        for run in runs
        for name in (*run.config.train.datasets, *run.config.train.validation_datasets)
    )
    place = catalog.find_datasets_dir()
    return overlap.notes({name: catalog.dataset_folder(name, place) for name in names})


def _training_loss(axes: Axes, run: RecordedRun) -> Lines:
    steps, loss = run.column("global_step"), run.column("train_loss")
    interval = min(run.config.train.checkpoint_interval, -(-len(run) // FEWEST_INTERVALS))
    interval *= -(-len(run) // (interval * MOST_INTERVALS))
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


def _losses_of_datasets(axes: Axes, run: RecordedRun) -> Lines:
    """Draw the validation loss on each of several datasets."""
    found = [(step.global_step, step.validation_losses or {}) for step in run.notable]
    names = dict.fromkeys(name for _, losses in found for name in losses)
    lines: Lines = {}
    for name, color in zip(names, itertools.cycle(drawing.COLOURS[2:]), strict=False):
        points = [(step, losses[name]) for step, losses in found if name in losses]
        x, y = np.array(points, dtype=float).T
        lines[f"validation on {name}"] = drawing.line(axes, x, y, color=color, linestyle=":")
    return lines


def _spikes(axes: Axes, run: RecordedRun) -> Lines:
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


TRAINING_CHARTS: Charts = {"loss-chart.png": loss_chart}

"""What became of a run, from its folder."""

import dataclasses
import math
from pathlib import Path

import numpy as np

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.experiments.experiment import Experiment, Measure, Outcome, Score, Target, Trial
from rungs.run import records
from rungs.run.folder import RunFolder
from rungs.run.recorded_run import AnyRecorded, RecordedPolicyRun, finite_points, kind_of

LAST_STEPS = 20
"""Steps whose mean is the training loss at the end."""


def outcome_of(
    experiment: Experiment, trial: Trial, folder: Path, exit_code: int, processor: str
) -> Outcome:
    """Return what became of a trial in a run folder, from the exit code of its process and the
    processor of the machine."""
    run = RunFolder(folder)
    recorded = kind_of(folder).load(folder) if run.metrics.exists() else None
    value = None
    if recorded is not None and len(recorded) and not exit_code:
        value = _measured(experiment.measure, recorded, run)
    why = f"ended with exit code {exit_code}" if exit_code else _why_none(experiment.measure)
    outcome = Outcome(
        group=trial.group,
        seed=trial.seed,
        run=trial.name,
        changes=dict(trial.changes),
        value=value,
        why=why if value is None else None,
        exit_code=exit_code,
    )
    if recorded is None or not len(recorded):
        return outcome
    losses = recorded.steps.parts("validation_losses")
    return dataclasses.replace(
        outcome,
        steps=len(recorded),
        tokens=int(recorded.column("tokens_seen")[-1]),
        minutes=float(recorded.seconds[-1]) / 60,
        tokens_per_second=recorded.steps.mean_tokens_per_second,
        device=_device(run, processor),
        curve=_curve(experiment.measure, recorded),
        losses={name: float(column[-1]) for name, column in losses.items()},
    )


def _measured(measure: Measure, recorded: AnyRecorded, run: RunFolder) -> float | None:
    if isinstance(measure, Target):
        return _reached(measure, recorded)
    if isinstance(measure, Score):
        scores = records.latest_scores(records.read(run, records.Evaluation))
        return next((one.value for (task, _), one in scores.items() if task == measure.score), None)
    if measure == "pass_at_1":
        found = recorded.validations if isinstance(recorded, RecordedPolicyRun) else []
        return found[-1][1].pass_at_1 if found else None
    if measure == "train_loss":
        values = recorded.column("train_loss")[-LAST_STEPS:]
        return float(values.mean()) if np.isfinite(values).all() else None
    value = float(recorded.column(measure)[-1])
    return value if math.isfinite(value) else None


def _reached(target: Target, recorded: AnyRecorded) -> float | None:
    """Return the minutes or tokens before the first validation with the loss or a lower one."""
    loss = target.minutes_to or target.tokens_to or 0.0
    unit = recorded.seconds / 60 if target.minutes_to else recorded.column("tokens_seen")
    at = np.flatnonzero(recorded.column("validation_loss") <= loss)
    return float(unit[at[0]]) if at.size else None


def _why_none(measure: Measure) -> str:
    if isinstance(measure, Target):
        return f"never reached {measure.minutes_to or measure.tokens_to:g}"
    return f"has no {measure.score if isinstance(measure, Score) else measure} at its end"


def _curve(measure: Measure, recorded: AnyRecorded) -> list[tuple[float, float]]:
    if measure == "pass_at_1" and isinstance(recorded, RecordedPolicyRun):
        return [(step + 1.0, found.pass_at_1) for step, found in recorded.validations]
    tokens, losses = finite_points(
        recorded.column("tokens_seen"), recorded.column("validation_loss")
    )
    return [(float(x), float(y)) for x, y in zip(tokens, losses, strict=True)]


def _device(run: RunFolder, processor: str) -> str:
    saved = list_checkpoints(run.checkpoints)
    kind = saved[-1].meta.environment.get("device", "cpu") if saved else "cpu"
    return processor if kind == "cpu" else kind

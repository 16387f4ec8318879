"""Checkpoints and validations at intervals of their own; `stop_after`: a run ends after that many
validations without a lower loss."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.config.run_config import load_run
from rungs.planning.forecast import disk_space
from rungs.run import metrics, records
from rungs.run.folder import RunFolder
from rungs.run.metrics import StepMetrics
from rungs.run.records import Event
from rungs.training import trainer
from rungs.training.trainer import EarlyStop, IntervalLosses, Intervals
from tests.support import recorded_runs
from tests.support.configs import train_config
from tests.support.starting import go, refusal
from tests.support.tiny_run import assert_same_outcome, change, make_run


def validations(run: RunFolder) -> list[int]:
    steps = metrics.read(run.metrics)
    return [step.global_step for step in steps if step.validation_loss is not None]


def saved(run: RunFolder) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)]


def test_validations_between_checkpoints() -> None:
    train = train_config(validation_interval=4, checkpoint_interval=10)
    timer = Intervals(train, lambda here: here)
    due = {step: timer.after(step, is_last=step == 23) for step in range(24)}
    assert [step for step in due if due[step].validation] == [0, 4, 8, 12, 16, 20, 23]
    assert [step for step in due if due[step].checkpoint] == [0, 10, 20, 23]
    assert [step for step in due if due[step].competes] == [0, 10, 20, 23]


def test_a_checkpoint_has_the_losses_since_the_one_before_and_whether_it_is_the_best(
    finished: RunFolder,
) -> None:
    steps = metrics.read(finished.metrics)
    checkpoints = list_checkpoints(finished.checkpoints)
    assert len(checkpoints) > 3
    for checkpoint in checkpoints:
        first = {0: 0, 23: 21}.get(checkpoint.step, checkpoint.step - 4)
        losses = np.array([step.train_loss for step in steps[first : checkpoint.step + 1]])
        meta = checkpoint.meta
        assert (meta.min_train_loss, meta.max_train_loss) == (losses.min(), losses.max())
        assert meta.avg_train_loss == pytest.approx(losses.mean(), rel=1e-14)
        assert meta.learning_rate == steps[checkpoint.step].learning_rate
        before = [s.validation_loss for s in steps[: checkpoint.step] if s.validation_loss]
        assert meta.is_best == ((meta.validation_loss or 0) < min(before, default=99))


def test_losses_since_a_checkpoint_are_the_same_after_a_signal_between_two() -> None:
    def step(number: int, loss: float | None) -> StepMetrics:
        return StepMetrics(**recorded_runs.step(number) | {"train_loss": loss})

    steps = [step(number, loss) for number, loss in enumerate([9.0, 4.0, None, 3.0, 5.0, 1.0])]
    assert IntervalLosses(5, steps[:1]).summary()["max_train_loss"] == 9
    resumed = IntervalLosses(5, steps[:3])
    resumed.add(steps[3])
    resumed.add(steps[4])
    resumed.add(steps[5])
    found = {"min_train_loss": 1.0, "max_train_loss": 5.0, "avg_train_loss": 13 / 4}
    assert resumed.summary() == IntervalLosses(5, steps).summary() == found
    assert IntervalLosses(1, steps).summary()["avg_train_loss"] == 1
    assert IntervalLosses(1, [step(0, None)]).summary() == {}


@pytest.mark.long
def test_the_interval_does_not_change_the_run(datasets_dir: Path, tmp_path: Path) -> None:
    runs = often, rarely = [
        make_run(tmp_path / f"every-{interval}", validation_interval=interval)
        for interval in (1, 24)
    ]
    for run in runs:
        assert go(run, datasets_dir) == 0
    assert validations(often) == list(range(24))
    assert validations(rarely) == [0, 23]
    for run in runs:
        lines = [dict(step.reproducible) for step in metrics.read(run.metrics)]
        for line in lines:
            line |= dict.fromkeys(("validation_loss", "validation_data", "bits_per_byte"))
        run.metrics.write_text(repr(lines))
    assert often.metrics.read_text() == rarely.metrics.read_text()
    for run in runs:
        run.metrics.unlink()
    assert_same_outcome(often, rarely)


def test_the_clock_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(trainer.time, "monotonic", lambda: now[0])
    train = train_config(checkpoint_interval=100, checkpoint_minutes=10, validation_minutes=4)
    timer = Intervals(train, lambda here: here)
    found = {}
    for step in range(1, 40):
        now[0] += 60
        found[step] = timer.after(step, is_last=False)
    assert [step for step, due in found.items() if due.checkpoint] == [11, 22, 33]
    assert [step for step, due in found.items() if due.validation] == [5, 10, 15, 20, 25, 30, 35]
    assert not any(due.competes for due in found.values())
    assert timer.after(100, is_last=False) == (True, True, True)
    assert timer.after(999, is_last=True) == (True, True, True)


@pytest.mark.parametrize(
    ("steps", "expected"), [("log", [0, 1, 2, 4, 8, 10, 20, 22]), ([3, 10, 40], [0, 3, 10, 20, 22])]
)
def test_more_checkpoints_are_saved_and_planned(
    steps: Any, expected: list[int], datasets_dir: Path, tmp_path: Path
) -> None:
    keys = {"checkpoint_interval": 10, "keep_checkpoints": -1, "max_steps": 23}
    run = make_run(tmp_path / "run", checkpoint_steps=steps, **keys)
    assert go(run, datasets_dir) == 0
    assert saved(run) == expected
    plan = disk_space(run, load_run(run.path), 23, None)
    assert plan.checkpoints == len(expected)


def test_more_checkpoints_are_not_deleted() -> None:
    with pytest.raises(ValueError, match="checkpoint_steps: needs keep_checkpoints -1"):
        train_config(checkpoint_steps="log")


CONSTANT: dict[str, Any] = {"learning_rate": 1e-20, "validation_interval": 2, "drop_rate": 0.0}
"""A run whose weights, and so whose validation loss, stay the same."""


def steps_of(run: RunFolder) -> int:
    return len(metrics.read(run.metrics))


def validated(number: int, loss: float | None, data: str = "a") -> StepMetrics:
    return StepMetrics(**recorded_runs.step(number, validation_loss=loss, validation_data=data))


@pytest.mark.parametrize(
    ("losses", "ends"),
    [
        ([3, 2, 2, 1, 1, 2], [None, None, None, None, None, 2]),
        ([3, None, 4, None, 3, 9], [None, None, None, None, 2, 3]),
        ([3, 4, 2, 4], [None] * 4),
    ],
)
def test_validations_without_a_lower_loss_are_counted(losses: Any, ends: list[int | None]) -> None:
    stop = EarlyStop(train_config(stop_after=2, validation_interval=5), [])
    for number, (loss, end) in enumerate(zip(losses, ends, strict=True)):
        assert stop.count(validated(5 * number, loss)) == end
        assert stop.count(validated(5 * number + 1, 99.0)) is None  # due by time


def test_a_new_start_counts_the_validations_before_it_and_only_those_on_the_same_data() -> None:
    train = train_config(stop_after=2, validation_interval=1)
    before = [validated(0, 1.0), validated(1, 2.0)]
    assert EarlyStop(train, before).count(validated(2, 2.0)) == 2
    stop = EarlyStop(train, before)
    assert stop.count(validated(2, 2.0, data="b")) is None
    assert stop.count(validated(3, 3.0, data="b")) is None
    assert EarlyStop(train_config(validation_interval=1), before).count(validated(2, 2.0)) is None


@pytest.mark.long
def test_a_run_ends_early_says_so_and_goes_on_when_more_is_allowed(
    tmp_path: Path, datasets_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="rungs")
    run = make_run(tmp_path / "run", **CONSTANT, stop_after=3, checkpoint_interval=5)
    assert go(run, datasets_dir) == 0
    assert steps_of(run) == 7
    last = list_checkpoints(run.checkpoints)[-1]
    assert (last.step, last.meta.total_steps, last.meta.stopped_after) == (6, 7, 3)
    (finish,) = [one for one in records.read(run, Event) if one.event == "finish"]
    assert "finished early: no lower validation loss in 3 validations than" in finish.text
    assert "the run ends early: no lower validation loss" in caplog.text
    caplog.clear()
    assert go(run, datasets_dir) == 0
    assert "stop_after ended it after 7 steps, as the last 3 validations" in caplog.text
    assert steps_of(run) == 7
    change(run, stop_after=5)
    assert go(run, datasets_dir) == 0
    assert steps_of(run) == 11
    change(run, stop_after=None)
    assert go(run, datasets_dir) == 0
    assert steps_of(run) == 24
    plain = make_run(tmp_path / "plain", **CONSTANT)
    assert go(plain, datasets_dir) == 0
    assert_same_outcome(run, plain)
    assert "stopped_after" not in json.loads(
        (list_checkpoints(plain.checkpoints)[-1].folder / "meta.json").read_text()
    )


def test_it_needs_a_validation_split(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", dataset="unsplit", stop_after=2)
    assert "stop_after: needs a dataset with a validation split" in refusal(run, datasets_dir)

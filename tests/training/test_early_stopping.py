"""`stop_after`: a run ends after that many validations without a lower loss."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.common.errors import UserError
from rungs.common.signals import Interrupted
from rungs.config.run_config import load_run
from rungs.run import metrics, records
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import StepMetrics
from rungs.run.records import Event
from rungs.training.dataset_learner import DatasetLearner, on_datasets
from rungs.training.start import launch
from rungs.training.trainer import EarlyStop
from tests.support.configs import train_config
from tests.support.recorded_runs import step
from tests.support.tiny_run import assert_same_outcome, change, make_dataset, make_run

pytestmark = pytest.mark.usefixtures("no_charts")
CONSTANT: dict[str, Any] = {"learning_rate": 1e-20, "validation_interval": 2, "drop_rate": 0.0}
"""A run whose weights, and so whose validation loss, stay the same."""


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    return folder


def go(run: RunFolder, datasets_dir: Path, **start: Any) -> None:
    assert launch(run, load_run(run.path), StartOptions(**start), on_datasets(datasets_dir)) == 0


def steps_of(run: RunFolder) -> int:
    return len(metrics.read(run.metrics))


def validated(number: int, loss: float | None, data: str = "a") -> StepMetrics:
    return StepMetrics(**step(number, validation_loss=loss, validation_data=data))


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
    go(run, datasets_dir)
    assert steps_of(run) == 7
    last = list_checkpoints(run.checkpoints)[-1]
    assert (last.step, last.meta.total_steps, last.meta.stopped_after) == (6, 7, 3)
    (finish,) = [one for one in records.read(run, Event) if one.event == "finish"]
    assert "finished early: no lower validation loss in 3 validations than" in finish.text
    assert "the run ends early: no lower validation loss" in caplog.text
    caplog.clear()
    go(run, datasets_dir)
    assert "stop_after ended it after 7 steps, as the last 3 validations" in caplog.text
    assert steps_of(run) == 7
    change(run, stop_after=5)
    go(run, datasets_dir)
    assert steps_of(run) == 11
    change(run, stop_after=None)
    go(run, datasets_dir)
    assert steps_of(run) == 24
    plain = make_run(tmp_path / "plain", **CONSTANT)
    go(plain, datasets_dir)
    assert_same_outcome(run, plain)
    assert "stopped_after" not in json.loads(
        (list_checkpoints(plain.checkpoints)[-1].folder / "meta.json").read_text()
    )


@pytest.mark.long
def test_a_stop_that_a_signal_delays_is_decided_by_the_next_start(
    tmp_path: Path, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", **CONSTANT, stop_after=2)
    validate = DatasetLearner.validate

    def interrupted(self: Any, found: StepMetrics, stops: Any) -> StepMetrics:
        if found.global_step == 4:
            raise Interrupted
        return validate(self, found, stops)

    with monkeypatch.context() as patch:
        patch.setattr(DatasetLearner, "validate", interrupted)
        launch(run, load_run(run.path), StartOptions(), on_datasets(datasets_dir))
    assert list_checkpoints(run.checkpoints)[-1].meta.stopped_after is None
    go(run, datasets_dir)
    assert steps_of(run) == 5
    assert list_checkpoints(run.checkpoints)[-1].meta.stopped_after == 2


def test_it_needs_a_validation_split(tmp_path: Path) -> None:
    make_dataset(tmp_path, "unsplit")
    (tmp_path / "unsplit" / "validation.safetensors").unlink()
    run = make_run(tmp_path / "run", dataset="unsplit", stop_after=2)
    with pytest.raises(UserError, match="stop_after: needs a dataset with a validation split"):
        go(run, tmp_path)

"""Checkpoints and validations at intervals of their own."""

from pathlib import Path

import pytest

from rungs.checkpointing.checkpoint_folder import best_of, list_checkpoints
from rungs.config import run_config
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.training import trainer
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from rungs.training.trainer import Intervals
from tests.support.configs import train_config
from tests.support.tiny_run import assert_same_outcome, make_dataset, make_run

pytestmark = pytest.mark.usefixtures("no_charts")


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    return folder


def go(run: RunFolder, datasets_dir: Path) -> RunFolder:
    assert (
        launch(run, run_config.load_run(run.path), StartOptions(), on_datasets(datasets_dir)) == 0
    )
    return run


def validated(run: RunFolder) -> list[int]:
    steps = metrics.read(run.metrics)
    return [step.global_step for step in steps if step.validation_loss is not None]


def saved(run: RunFolder) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(run.checkpoints)]


def test_validations_between_checkpoints(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(
        tmp_path / "run", validation_interval=4, checkpoint_interval=10, keep_checkpoints=-1
    )
    go(run, datasets_dir)
    assert validated(run) == [0, 4, 8, 12, 16, 20, 23]
    assert saved(run) == [0, 10, 20, 23]
    best = best_of(list_checkpoints(run.checkpoints))
    assert best is not None
    assert best.step in (0, 20, 23)  # 10 has no validation loss


@pytest.mark.long
def test_the_interval_does_not_change_the_run(datasets_dir: Path, tmp_path: Path) -> None:
    often = go(make_run(tmp_path / "often", validation_interval=1), datasets_dir)
    rarely = go(make_run(tmp_path / "rarely", validation_interval=24), datasets_dir)
    assert validated(often) == list(range(24))
    assert validated(rarely) == [0, 23]
    for run in (often, rarely):
        lines = [dict(step.reproducible) for step in metrics.read(run.metrics)]
        for line in lines:
            line |= dict.fromkeys(("validation_loss", "validation_data", "bits_per_byte"))
        run.metrics.write_text(repr(lines))
    assert often.metrics.read_text() == rarely.metrics.read_text()
    for run in (often, rarely):
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


@pytest.mark.long
def test_checkpoints_by_the_clock(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", checkpoint_interval=100, checkpoint_minutes=1e-9)
    go(run, datasets_dir)
    assert saved(run)[-3:] == [21, 22, 23]
    assert validated(run) == [0, 23]

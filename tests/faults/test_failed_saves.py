"""A save that fails in the background ends the run within a step or two, with one line."""

import errno
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing import (
    checkpoint_folder,
    manifest,
    optimizer_state,
    saver,
)
from rungs.checkpointing.checkpoint_folder import checkpoint_name
from rungs.run.folder import RunFolder
from rungs.step.nonfinite import Flags
from rungs.training import dataset_learner
from tests.faults.injected_faults import fail
from tests.faults.short_runs import checkpoint_steps, failure_message, train_here
from tests.support.tiny_run import assert_same_outcome, losses


class FailedSave:
    """What Orbax returns if its own thread fails."""

    def result(self) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes [os_error_code='28']")


def disk_full(*_: Any) -> None:
    fail(errno.ENOSPC)


def bug(*_: Any) -> None:
    raise KeyError("a bug")


@pytest.fixture
def wait_after_a_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the next step wait until the save before it has ended or failed."""
    save = saver.Saver.save

    def save_and_wait(self: saver.Saver, *arguments: Any) -> Flags:
        flags = save(self, *arguments)
        assert self._pending is not None
        self._pending.exception()
        return flags

    monkeypatch.setattr(saver.Saver, "save", save_and_wait)


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "name", "fault", "reason"),
    [
        (manifest, "write_manifest", disk_full, "No space left on device ("),
        (optimizer_state, "save_async", lambda *_: FailedSave(), "free some space"),
    ],
)
@pytest.mark.usefixtures("wait_after_a_save")
def test_a_failure_in_the_background_is_reported_at_the_next_step(
    owner: Any,
    name: str,
    fault: Any,
    reason: str,
    run: RunFolder,
    datasets_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps = 0
    make_step = dataset_learner.make_step

    def count_steps(*arguments: Any) -> Any:
        take = make_step(*arguments)

        def step(*arguments: Any) -> Any:
            nonlocal steps
            steps += 1
            return take(*arguments)

        return step

    monkeypatch.setattr(dataset_learner, "make_step", count_steps)
    monkeypatch.setattr(owner, name, fault)
    message = failure_message(run, datasets_dir)
    assert message.startswith(f"{run.checkpoints}: the checkpoint of step 0 could not be written: ")
    assert reason in message
    assert steps == 1
    assert checkpoint_steps(run) == []


@pytest.mark.long
def test_a_failure_of_the_last_save_is_reported(
    run: RunFolder, uninterrupted: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest = manifest.write_manifest

    def write_or_fail(folder: Path, *arguments: Any) -> None:
        if folder.name.endswith("000007"):
            bug()
        write_manifest(folder, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(manifest, "write_manifest", write_or_fail)
        assert "the checkpoint of step 7" in failure_message(run, datasets_dir)
    assert len(losses(run)) == 8
    assert train_here(run, datasets_dir) == 0
    assert_same_outcome(run, uninterrupted)


def test_a_step_saved_again_never_overwrites_the_first_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamps = iter(["20260101Z000000", "20260101Z000000", "20260101Z000001"])
    monkeypatch.setattr(checkpoint_folder, "time_stamp", lambda: next(stamps))
    (tmp_path / "20260101Z000000-step-000007").mkdir()
    assert checkpoint_name(tmp_path, 7) == "20260101Z000001-step-000007"

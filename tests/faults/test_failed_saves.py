"""A save that fails in the background ends the run within a step or two, with one line."""

import errno
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing import (
    checkpoint_folder,
    manifest,
    optimizer_state,
    retention,
    saver,
    weights_file,
)
from rungs.checkpointing.checkpoint_folder import checkpoint_name, list_checkpoints
from rungs.run.folder import RunFolder
from rungs.step.nonfinite import Flags
from rungs.training import dataset_learner
from tests.faults.injected_faults import fail
from tests.faults.short_runs import checkpoint_steps, failure_message, train_here
from tests.support.tiny_run import assert_same_outcome, change, losses


class FailedSave:
    """What Orbax returns if its own thread fails."""

    def result(self) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: Failed to write 9 bytes [os_error_code='28']")


def disk_full(*_: Any) -> None:
    fail(errno.ENOSPC)


def quota_exceeded(*_: Any) -> None:
    fail(errno.EDQUOT)


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
        (weights_file, "write_weights", disk_full, "No space left on device ("),
        pytest.param(
            *(weights_file, "write_weights", bug, "KeyError: 'a bug'; fix that"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(manifest, "write_manifest", disk_full, "No space left on device ("),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(optimizer_state, "save_async", disk_full, "No space left on device ("),
            marks=pytest.mark.long,
        ),
        (optimizer_state, "save_async", lambda *_: FailedSave(), "No space left on device ("),
    ],
)
@pytest.mark.usefixtures("no_charts", "wait_after_a_save")
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
@pytest.mark.parametrize(
    ("owner", "name", "fault", "reason"),
    [
        (weights_file, "write_weights", quota_exceeded, "Disk quota exceeded"),
        (optimizer_state, "save_async", lambda *_: FailedSave(), "No space left on device"),
    ],
)
@pytest.mark.usefixtures("no_charts")
def test_a_quota_for_two_checkpoints_and_one_that_is_written(
    owner: Any,
    name: str,
    fault: Any,
    reason: str,
    run: RunFolder,
    uninterrupted: RunFolder,
    datasets_dir: Path,
    messages: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk says that it has space, and more would be kept. Each save begins again once an old
    checkpoint is gone; if none may go, the run ends."""
    original = getattr(owner, name)

    def write_or_fail(folder: Path, *arguments: Any) -> Any:
        is_full = len(list_checkpoints(run.checkpoints)) >= 2
        return (fault if is_full else original)(folder, *arguments)

    change(run, keep_checkpoints=4)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, write_or_fail)
        assert train_here(run, datasets_dir) == 0
        assert checkpoint_steps(run) == [6, 7]
        assert f"the checkpoint of step 6: {reason}; writing it again" in messages.text
        assert messages.text.count("too little space for the next checkpoint; deleting") == 2
    assert_same_outcome(run, uninterrupted)


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_a_quota_when_all_checkpoints_are_kept(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights = weights_file.write_weights

    def write_or_fail(folder: Path, *arguments: Any) -> Any:
        is_full = len(list_checkpoints(run.checkpoints)) >= 2
        return (quota_exceeded if is_full else write_weights)(folder, *arguments)

    monkeypatch.setattr(weights_file, "write_weights", write_or_fail)
    message = failure_message(run, datasets_dir)
    assert "the checkpoint of step 6 could not be written: Disk quota exceeded (" in message
    assert checkpoint_steps(run) == [0, 3]


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
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


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_pruning_ignores_a_checkpoint_that_is_already_gone(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = checkpoint_folder.list_checkpoints

    def list_a_ghost(folder: Path) -> list[manifest.Checkpoint]:
        found = listed(folder)
        ghost = folder / "20200101Z000000-step-000000"
        meta = found[0].meta.model_copy(update={"selection_loss": None})
        return [manifest.Checkpoint(ghost, meta), *found]

    assert train_here(run, datasets_dir) == 0
    monkeypatch.setattr(checkpoint_folder, "list_checkpoints", list_a_ghost)
    retention.delete_old(run.checkpoints, keep=3)
    assert checkpoint_steps(run) == [3, 6, 7]


@pytest.mark.long
@pytest.mark.parametrize(
    "clock", [pytest.param("stands still", marks=pytest.mark.long), "goes back"]
)
@pytest.mark.usefixtures("no_charts")
def test_a_step_saved_again_never_overwrites_the_first_save(
    clock: str, run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stamp = "20260101Z000000"
    earlier = "20250101Z000000" if clock == "goes back" else stamp
    monkeypatch.setattr(checkpoint_folder, "time_stamp", lambda: stamp)
    assert train_here(run, datasets_dir) == 0
    first = list_checkpoints(run.checkpoints)[-1]
    assert first.folder.name == f"{stamp}-step-000007"
    monkeypatch.setattr(checkpoint_folder, "time_stamp", lambda: earlier)
    assert checkpoint_name(run.checkpoints, 7) == "20260101Z000001-step-000007"
    assert checkpoint_name(run.checkpoints, 8) == f"{earlier}-step-000008"
    (run.checkpoints / ".20260101Z000059-step-000007").mkdir()
    (run.checkpoints / "no-time-step-000007").mkdir()
    assert checkpoint_name(run.checkpoints, 7) == "20260101Z000100-step-000007"

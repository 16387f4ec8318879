"""Folders that are read-only, removed or moved during training: reported in one line, and no
further steps are taken for nothing."""

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing import checkpoint_folder, manifest
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.saver import Saver
from rungs.common import disk as disk_module
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.run.metrics import MetricsLog
from tests.faults.injected_faults import act_at_call, fail, remove_at_step
from tests.faults.short_runs import (
    checkpoint_steps,
    error_line,
    failure_message,
    short_run,
    train_here,
    train_with_fault,
)
from tests.faults.tmpfs import make_read_only, make_writable, needs_mount, tmpfs
from tests.support.tiny_run import assert_same_outcome, final_arrays, losses, train


@needs_mount
def test_a_read_only_run_folder_is_an_error(datasets_dir: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 1_000_000) as disk:
        run = short_run(disk / "run")
        before = sorted(disk.rglob("*"))
        make_read_only(disk)
        line = error_line(train(run, datasets_dir), code=2)
        make_writable(disk)
        assert line == f"{run.path}: cannot be written to: Read-only file system"
        assert sorted(disk.rglob("*")) == before


@pytest.mark.parametrize(
    "number",
    [
        errno.EROFS,
        errno.EIO,
        errno.EACCES,
    ],
)
@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (disk_module, "flush", "the metrics so far"),
        (checkpoint_folder, "checkpoint_name", "the checkpoint of step 0"),
        (manifest, "write_manifest", "the checkpoint of step 0"),
        (checkpoint_folder, "update_links", "the names best and latest"),
    ],
)
@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_a_folder_that_becomes_unwritable(
    owner: Any,
    name: str,
    what: str,
    number: int,
    run: RunFolder,
    datasets_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    append = MetricsLog.append

    def append_then_break(self: MetricsLog, step: metrics.StepMetrics) -> None:
        append(self, step)
        monkeypatch.setattr(owner, name, lambda *_: fail(number))

    monkeypatch.setattr(MetricsLog, "append", append_then_break)
    message = failure_message(run, datasets_dir)
    assert f": {what} could not be written: {os.strerror(number)}" in message
    assert message.endswith("; fix that, then run the same command again")
    assert len(losses(run)) <= 4


@pytest.mark.long
def test_a_removed_run_folder(datasets_dir: Path, tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", checkpoint_interval=100)
    line = error_line(train_with_fault(f"remove_at_step:4:{run.path}", run, datasets_dir))
    assert line.startswith(f"{run.path}: the run folder was removed or moved during training")
    assert not run.path.exists()


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_a_moved_run_folder_resumes_at_its_new_place(
    run: RunFolder,
    uninterrupted: RunFolder,
    datasets_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moved = RunFolder(tmp_path / "moved")

    def move(*_: object) -> None:
        while not (run.checkpoints / "latest").resolve().name.endswith("000003"):
            time.sleep(0.01)
        run.path.rename(moved.path)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "append", MetricsLog.append)
        act_at_call(MetricsLog, "append", 6, move)
        assert "was removed or moved" in failure_message(run, datasets_dir)
    assert train_here(moved, datasets_dir) == 0
    assert_same_outcome(moved, uninterrupted)


@pytest.mark.long
@pytest.mark.parametrize(
    "change",
    [
        "removed",
        pytest.param("truncated", marks=pytest.mark.long),
        pytest.param("replaced", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("no_charts")
def test_removed_truncated_or_replaced_metrics(
    change: str,
    run: RunFolder,
    datasets_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(*_: Any) -> None:
        if change == "truncated":
            run.metrics.write_bytes(b"")
        else:
            text = run.metrics.read_bytes()
            run.metrics.unlink()
            if change == "replaced":
                run.metrics.write_bytes(text)

    monkeypatch.setattr(MetricsLog, "append", MetricsLog.append)
    act_at_call(MetricsLog, "append", 6, lose)
    message = failure_message(run, datasets_dir)
    assert message.startswith(f"{run.metrics}: removed, truncated or replaced during training")
    assert checkpoint_steps(run) == [0, 3]


@pytest.mark.usefixtures("no_charts")
def test_metrics_that_lack_steps_before_the_checkpoint_are_noticed(
    uninterrupted: RunFolder,
    datasets_dir: Path,
    tmp_path: Path,
    messages: pytest.LogCaptureFixture,
) -> None:
    run = RunFolder(shutil.copytree(uninterrupted.path, tmp_path / "run", symlinks=True))
    lines = run.metrics.read_text().splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:2]))
    shutil.rmtree(list_checkpoints(run.checkpoints)[-1].folder)
    with run.lock() as own:
        assert train_here(own, datasets_dir) == 0
    assert f"{run.metrics}: lacks 5 steps before the checkpoint" in messages.text
    assert [step.global_step for step in metrics.read(run.metrics)] == [0, 1, 7]


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_a_removed_checkpoints_folder_does_not_lose_the_running_training(
    run: RunFolder,
    uninterrupted: RunFolder,
    datasets_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: pytest.LogCaptureFixture,
) -> None:
    def wait_then_remove(self: Saver) -> None:
        wait(self)
        if {c.step for c in list_checkpoints(run.checkpoints)} == {0, 3}:
            shutil.rmtree(run.checkpoints)

    wait = Saver.wait
    monkeypatch.setattr(Saver, "wait", wait_then_remove)
    assert train_here(run, datasets_dir) == 0
    expected = f"{run.checkpoints}: was removed with all checkpoints in it; created again"
    assert expected in messages.text
    assert checkpoint_steps(run) == [6, 7]
    assert losses(run) == losses(uninterrupted)
    one, other = final_arrays(run), final_arrays(uninterrupted)
    assert all(one[name].tobytes() == array.tobytes() for name, array in other.items())


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_a_checkpoints_folder_removed_during_a_save(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "write_manifest", manifest.write_manifest)
    act_at_call(manifest, "write_manifest", 2, lambda *_: shutil.rmtree(run.checkpoints))
    message = failure_message(run, datasets_dir)
    assert "the checkpoint of step 3 could not be written: No such file or directory" in message
    assert "restore what was removed or moved" in message


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_a_checkpoint_whose_weights_are_removed_during_the_save_is_not_finished(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "write_manifest", manifest.write_manifest)

    def remove_weights(folder: Path, *_: Any) -> None:
        (folder / "model.safetensors").unlink()

    act_at_call(manifest, "write_manifest", 2, remove_weights)
    assert "the checkpoint of step 3 could not be written" in failure_message(run, datasets_dir)
    assert checkpoint_steps(run) == [0]


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
def test_a_removed_dataset_is_not_needed_before_the_next_start(
    uninterrupted: RunFolder,
    datasets_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = Path(shutil.copytree(datasets_dir, tmp_path / "datasets"))
    run = short_run(tmp_path / "run")
    monkeypatch.setattr(MetricsLog, "append", MetricsLog.append)
    remove_at_step("2", str(copy / "tiny"))
    assert train_here(run, copy) == 0
    assert_same_outcome(run, uninterrupted)
    with pytest.raises(ValueError, match="tiny: no such dataset"):
        train_here(run, copy)

"""Folders and files that are lost, linked or unwritable during training: one line, and no further
steps are taken for nothing."""

import errno
import shutil
from pathlib import Path

import pytest

from rungs.checkpointing import manifest
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.common import disk as disk_module
from rungs.common.errors import UserError
from rungs.integrations.mirroring import restore_if_empty
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.run.metrics import MetricsLog
from tests.faults.injected_faults import act_at_call, fail
from tests.faults.short_runs import failure_message, short_run, train_here
from tests.faults.tmpfs import make_read_only, make_writable, needs_mount, tmpfs
from tests.support.tiny_run import assert_same_outcome, losses

LOST_CHECKPOINT = "the checkpoint of step 3 could not be written: No such file or directory"


@pytest.mark.long
def test_what_is_lost_is_named(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "write_manifest", manifest.write_manifest)
    moved = run.path.with_name("moved")
    act_at_call(manifest, "write_manifest", 2, lambda *_: run.path.rename(moved))
    assert LOST_CHECKPOINT in failure_message(run, datasets_dir)


@pytest.mark.long
def test_a_folder_that_becomes_read_only(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = MetricsLog.append

    def append_then_break(self: MetricsLog, step: metrics.StepMetrics) -> None:
        append(self, step)
        monkeypatch.setattr(disk_module, "flush", lambda *_: fail(errno.EROFS))

    monkeypatch.setattr(MetricsLog, "append", append_then_break)
    message = failure_message(run, datasets_dir)
    what = "the metrics so far could not be written: Read-only file system"
    assert f": {what}; fix that" in message
    assert len(losses(run)) <= 4


@needs_mount
def test_a_run_folder_that_is_read_only_at_the_start(tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 1_000_000) as disk:
        run = short_run(disk / "run")
        before = sorted(disk.rglob("*"))
        make_read_only(disk)
        with pytest.raises(UserError, match="cannot be written to: Read-only file system"):
            run.lock().__enter__()
        make_writable(disk)
        assert sorted(disk.rglob("*")) == before


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
    assert train_here(run, datasets_dir) == 0
    assert f"{run.metrics}: lacks 5 steps before the checkpoint" in messages.text
    assert [step.global_step for step in metrics.read(run.metrics)] == [0, 1, 7]


@needs_mount
@pytest.mark.long
def test_checkpoints_on_another_disk(
    uninterrupted: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    """A run starts over, goes back and is restored from a mirror; other files there stay."""
    run, mirror, place = short_run(tmp_path / "run"), tmp_path / "mirror", tmp_path / "disk"
    shutil.copytree(uninterrupted.path, mirror, symlinks=True)
    (mirror / "mirror.json").write_text('{"run": "0123456789abcdef0123456789abcdef", "copied": {}}')
    with tmpfs(place, 20_000_000):
        (place / "mine").mkdir(parents=True)
        (place / "mine" / "notes.txt").write_text("mine")
        run.checkpoints.symlink_to(place / "mine")
        with run.lock():
            restore_if_empty(run, str(mirror), lambda _: None)
            assert_same_outcome(run, uninterrupted)
            assert train_here(run, datasets_dir, rewind_to="step-000003") == 0
            assert train_here(run, datasets_dir, fresh=True) == 0
            assert_same_outcome(run, uninterrupted)
        first, second = sorted(run.aside.iterdir())
        assert [c.step for c in list_checkpoints(first / "checkpoints")] == [6, 7]
        assert [c.step for c in list_checkpoints(second / "checkpoints")] == [0, 3, 6, 7]
        assert all(not c.damage() for c in list_checkpoints(second / "checkpoints"))
        assert (place / "mine" / "notes.txt").read_text() == "mine"
        assert run.checkpoints.is_symlink()

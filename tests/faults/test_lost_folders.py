"""Folders that are read-only, or go while a run writes to them: a line, and no training for
nobody."""

import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing import checkpoint_folder, links, manifest
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.saver import Saver
from rungs.common import disk as disk_module
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.run.metrics import MetricsLog
from tests.faults.fault_runs import error_line, failure, faulty, go, short_run, whole_steps
from tests.faults.small_disk import make_read_only, make_writable, needs_mount, small_disk
from tests.faults.storage_faults import before_call, fail, remove_at_step
from tests.support.tiny_run import assert_same_outcome, final_arrays, losses, train

pytest_plugins = ["fault_fixtures"]


@needs_mount
def test_a_read_only_run_folder_is_refused(datasets_dir: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        run = short_run(disk / "run")
        before = sorted(disk.rglob("*"))
        make_read_only(disk)
        line = error_line(train(run, datasets_dir), code=2)
        make_writable(disk)
        assert line == f"{run.path}: cannot be written to: Read-only file system"
        assert sorted(disk.rglob("*")) == before


@pytest.mark.parametrize("number", [errno.EROFS, errno.EIO, errno.EACCES])
@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (disk_module, "flush", "the metrics so far"),
        (checkpoint_folder, "checkpoint_name", "the checkpoint of step 0"),
        (manifest, "write_manifest", "the checkpoint of step 0"),
        (links, "update_links", "the names best and latest"),
    ],
)
@pytest.mark.usefixtures("no_charts")
def test_a_folder_that_cannot_be_written_to_any_more(
    owner: Any,
    name: str,
    what: str,
    number: int,
    run: RunFolder,
    datasets_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begin = MetricsLog.append

    def append_then_break(self: MetricsLog, step: metrics.StepMetrics) -> None:
        begin(self, step)
        monkeypatch.setattr(owner, name, lambda *_: fail(number))

    monkeypatch.setattr(MetricsLog, "append", append_then_break)
    message = failure(run, datasets_dir)
    assert f": {what} could not be written: {os.strerror(number)}" in message
    assert message.endswith(
        "; fix that, then run the same command to resume from the last checkpoint"
    )
    assert len(losses(run)) <= 4


@pytest.mark.long
def test_a_run_folder_that_is_removed(datasets_dir: Path, tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", checkpoint_interval=100)
    line = error_line(faulty(f"storage_faults.remove_at_step:4:{run.path}", run, datasets_dir))
    assert line.startswith(f"{run.path}: the run folder was removed or moved during training")
    assert not run.path.exists()


@pytest.mark.usefixtures("no_charts")
def test_a_run_folder_that_is_moved_goes_on_where_it_is(
    run: RunFolder,
    straight: RunFolder,
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
        before_call(MetricsLog, "append", 6, move)
        assert "was removed or moved" in failure(run, datasets_dir)
    assert go(moved, datasets_dir) == 0
    assert_same_outcome(moved, straight)


@pytest.mark.parametrize("change", ["removed", "cut", "replaced"])
@pytest.mark.usefixtures("no_charts")
def test_metrics_that_are_lost(
    change: str,
    run: RunFolder,
    datasets_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def lose(*_: Any) -> None:
        if change == "cut":
            run.metrics.write_bytes(b"")
        else:
            text = run.metrics.read_bytes()
            run.metrics.unlink()
            if change == "replaced":
                run.metrics.write_bytes(text)

    monkeypatch.setattr(MetricsLog, "append", MetricsLog.append)
    before_call(MetricsLog, "append", 6, lose)
    message = failure(run, datasets_dir)
    assert message.startswith(f"{run.metrics}: removed, truncated or replaced during training")
    assert whole_steps(run) == [0, 3]


@pytest.mark.usefixtures("no_charts")
def test_checkpoints_that_are_removed_do_not_cost_what_is_being_learned(
    run: RunFolder,
    straight: RunFolder,
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
    assert go(run, datasets_dir) == 0
    expected = f"{run.checkpoints}: was removed with all checkpoints in it; created again"
    assert expected in messages.text
    assert whole_steps(run) == [6, 7]
    assert losses(run) == losses(straight)
    one, other = final_arrays(run), final_arrays(straight)
    assert all(one[name].tobytes() == array.tobytes() for name, array in other.items())


@pytest.mark.usefixtures("no_charts")
def test_checkpoints_that_are_removed_under_a_save(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "write_manifest", manifest.write_manifest)
    before_call(manifest, "write_manifest", 2, lambda *_: shutil.rmtree(run.checkpoints))
    message = failure(run, datasets_dir)
    assert "the checkpoint of step 3 could not be written: No such file or directory" in message
    assert "restore what was removed or moved" in message


@pytest.mark.usefixtures("no_charts")
def test_a_checkpoint_whose_weights_are_removed_under_the_save_is_not_sealed(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "write_manifest", manifest.write_manifest)

    def remove_weights(folder: Path, *_: Any) -> None:
        (folder / "model.safetensors").unlink()

    before_call(manifest, "write_manifest", 2, remove_weights)
    assert "the checkpoint of step 3 could not be written" in failure(run, datasets_dir)
    assert whole_steps(run) == [0]


@pytest.mark.usefixtures("no_charts")
def test_a_dataset_that_is_removed_is_not_needed_before_the_next_start(
    straight: RunFolder,
    datasets_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copy = Path(shutil.copytree(datasets_dir, tmp_path / "datasets"))
    run = short_run(tmp_path / "run")
    monkeypatch.setattr(MetricsLog, "append", MetricsLog.append)
    remove_at_step("2", str(copy / "tiny"))
    assert go(run, copy) == 0
    assert_same_outcome(run, straight)
    with pytest.raises(ValueError, match="tiny: no such dataset"):
        go(run, copy)

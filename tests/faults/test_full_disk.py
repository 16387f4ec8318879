"""A disk that is full costs the steps since the last checkpoint, and says so; what is not needed to
go on costs nothing."""

import errno
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rungs.checkpointing import weights_file
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.common.errors import RunFailure
from rungs.run.folder import RunFolder
from rungs.run.metrics import MetricsLog
from tests.faults.fault_runs import (
    assert_no_torn_line,
    error_line,
    failure,
    faulty,
    go,
    short_run,
    whole_steps,
)
from tests.faults.small_disk import free_bytes, grow, needs_mount, small_disk
from tests.faults.storage_faults import fail, fill_up_in_weights
from tests.support.tiny_run import assert_same_outcome, train

pytest_plugins = ["fault_fixtures"]

ROOM = re.compile(r"No space left on device \(([\d,]+) bytes needed, ([\d,]+) free there\)")
CHECKPOINT_BYTES = 123_000 + 2 * 123_000


def room_of(message: str) -> tuple[int, int]:
    """Bytes needed and free, as a message says."""
    found = ROOM.search(message)
    assert found, message
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


@needs_mount
@pytest.mark.long
def test_a_small_disk(straight: RunFolder, datasets_dir: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 1_000_000) as disk:
        run = short_run(disk / "run")
        message = error_line(train(run, datasets_dir))
        assert message.startswith(f"{run.checkpoints}: the checkpoint of step 6 could not be")
        assert "free some space, then run the same command" in message
        needed, free = room_of(message)
        assert needed == pytest.approx(CHECKPOINT_BYTES, rel=0.2)
        assert free < needed
        charts = sum(chart.stat().st_size for chart in run.charts)  # drawn before or after
        assert free_bytes(disk) - 50_000 < free < free_bytes(disk) + charts + 50_000
        assert whole_steps(run) == [0, 3]
        assert_no_torn_line(run)
        assert message in run.log.read_text()
        grow(disk, 40_000_000)
        assert train(run, datasets_dir).returncode == 0
        assert_same_outcome(run, straight)


@pytest.mark.long
@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(
    "limit", [pytest.param(100_000, id="safetensors"), pytest.param(150_000, id="Orbax's threads")]
)
def test_files_that_may_not_grow(
    limit: int, run: RunFolder, straight: RunFolder, datasets_dir: Path
) -> None:
    message = error_line(faulty(f"storage_faults.limit_files:{limit}", run, datasets_dir))
    assert message.startswith(f"{run.checkpoints}: the checkpoint of step 0 could not be written")
    assert "File too large" in message
    assert "ulimit -f" in message
    assert whole_steps(run) == []
    assert_no_torn_line(run)
    assert go(run, datasets_dir) == 0
    assert_same_outcome(run, straight)


@pytest.mark.usefixtures("no_charts")
def test_a_disk_that_fills_up_while_a_checkpoint_is_written(
    run: RunFolder, straight: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(weights_file, "write_weights", weights_file.write_weights)
        fill_up_in_weights("2")
        message = failure(run, datasets_dir)
    assert "the checkpoint of step 3 could not be written" in message
    assert room_of(message)[0] == pytest.approx(CHECKPOINT_BYTES, rel=0.2)
    assert whole_steps(run) == [0]
    assert_no_torn_line(run)
    assert go(run, datasets_dir) == 0
    assert_same_outcome(run, straight)


@pytest.mark.usefixtures("no_charts")
def test_a_checkpoint_that_will_not_fit_is_not_begun(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=10**6, free=CHECKPOINT_BYTES)
    monkeypatch.setattr("rungs.common.disk.shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr(
        "rungs.checkpointing.checkpoint_folder.checkpoint_name", lambda *_: pytest.fail("was begun")
    )
    assert room_of(failure(run, datasets_dir))[1] == CHECKPOINT_BYTES


@pytest.mark.usefixtures("no_charts")
def test_a_disk_that_does_not_say_how_large_it_is_has_room(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "rungs.common.disk.shutil.disk_usage", lambda _: SimpleNamespace(total=0, free=0)
    )
    assert go(run, datasets_dir) == 0


class Filled:
    """A file with room for so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, content: memoryview) -> int:
        if not self._room:
            fail(errno.ENOSPC)
        written: int = self._file.write(content[: self._room])
        self._room -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.usefixtures("no_charts")
def test_no_room_for_a_line_of_metrics(
    run: RunFolder, straight: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        created = MetricsLog.__init__

        def create(self: MetricsLog, path: Path, last_step: int) -> None:
            created(self, path, last_step)
            self._file = Filled(self._file, room=1250)  # type: ignore[assignment]

        patch.setattr(MetricsLog, "__init__", create)
        message = failure(run, datasets_dir)
    assert message.startswith(f"{run.metrics}: the metrics of step 4 could not be written: ")
    assert room_of(message)[0] < 400
    assert len(run.metrics.read_text().splitlines()) == 4
    assert_no_torn_line(run)
    assert go(run, datasets_dir) == 0
    assert_same_outcome(run, straight)


@pytest.mark.usefixtures("no_charts")
def test_no_room_for_the_metrics_at_a_start(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert go(run, datasets_dir) == 0
    before = run.metrics.read_bytes()
    shutil.rmtree(list_checkpoints(run.checkpoints)[-1].folder)
    monkeypatch.setattr("rungs.common.disk.flush", lambda _: fail(errno.ENOSPC))
    message = failure(run, datasets_dir)
    assert message.startswith(f"{run.metrics}: the metrics so far could not be written: No space")
    assert run.metrics.read_bytes() == before
    assert not list(run.path.glob("*.new"))


@pytest.mark.long
def test_charts_and_log_do_not_stop_a_run(run: RunFolder, datasets_dir: Path) -> None:
    run.log.symlink_to("/dev/full")
    (run.path / "loss-chart.png").mkdir()
    done = train(run, datasets_dir)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert done.stderr.count("train.log: could not be written: [Errno 28] No space left") == 1
    assert "the charts could not be drawn: " in done.stderr
    assert whole_steps(run) == [0, 3, 6, 7]


@pytest.mark.usefixtures("no_charts")
def test_a_log_that_cannot_be_opened_does_not_stop_a_run(
    run: RunFolder, datasets_dir: Path, messages: pytest.LogCaptureFixture
) -> None:
    run.log.mkdir()
    assert go(run, datasets_dir) == 0
    assert f"{run.log}: cannot be written to: Is a directory" in messages.text


def test_no_room_for_the_lock(run: RunFolder) -> None:
    (run.path / "holder.lock").symlink_to("/dev/full")
    with pytest.raises(RunFailure, match="the lock of the run could not be written: No space"):
        run.lock().__enter__()


@pytest.mark.parametrize(("owner", "name"), [(shutil, "copy2"), (Path, "mkdir")])
@pytest.mark.usefixtures("no_charts")
def test_no_room_to_move_aside_what_fresh_leaves_behind(
    owner: Any,
    name: str,
    straight: RunFolder,
    datasets_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = RunFolder(shutil.copytree(straight.path, tmp_path / "copy", symlinks=True))
    original = getattr(owner, name)

    def fail_below_aside(*paths: Any, **named: Any) -> Any:
        if any(run.aside in Path(path).parents for path in paths):
            fail(errno.ENOSPC)
        return original(*paths, **named)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail_below_aside)
        message = failure(run, datasets_dir, fresh=True)
    assert message.startswith(f"{run.path}: what this start changes could not be written: No space")
    assert not run.aside.exists() or not list(run.aside.iterdir())
    assert_same_outcome(run, straight)
    assert go(run, datasets_dir, fresh=True) == 0
    assert_same_outcome(run, straight)
    (aside,) = run.aside.iterdir()
    assert_same_outcome(RunFolder(aside), straight)

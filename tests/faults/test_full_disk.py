"""A full disk ends the run with the bytes needed and free, and loses only the steps since the last
checkpoint; charts, logs and caches that cannot be written do not end it."""

import errno
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rungs.common.disk import folder_bytes
from rungs.common.errors import RunFailure
from rungs.run.folder import RunFolder
from rungs.run.metrics import MetricsLog
from tests.faults.injected_faults import fail
from tests.faults.short_runs import (
    assert_metrics_are_complete_lines,
    checkpoint_steps,
    error_line,
    failure_message,
    short_run,
    train_here,
    train_with_fault,
)
from tests.faults.tmpfs import free_bytes, needs_mount, resize, tmpfs
from tests.support.tiny_run import assert_same_outcome, change, train

SPACE = re.compile(r"No space left on device \(([\d,]+) bytes needed, ([\d,]+) bytes free there\)")
CHECKPOINT_BYTES = 123_000 + 2 * 123_000


def space_in(message: str) -> tuple[int, int]:
    """Return the bytes needed and free that a message reports."""
    found = SPACE.search(message)
    assert found, message
    return int(found[1].replace(",", "")), int(found[2].replace(",", ""))


@needs_mount
@pytest.mark.long
def test_a_real_full_disk(uninterrupted: RunFolder, datasets_dir: Path, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", 1_000_000) as disk:
        run = short_run(disk / "run")
        message = error_line(train(run, datasets_dir))
        assert message.startswith(f"{run.checkpoints}: the checkpoint of step 6 could not be")
        assert "free some space, then run the same command" in message
        needed, free = space_in(message)
        assert needed == pytest.approx(CHECKPOINT_BYTES, rel=0.2)
        assert free < needed
        charts = sum(chart.stat().st_size for chart in run.charts)  # drawn before or after
        assert free_bytes(disk) - 50_000 < free < free_bytes(disk) + charts + 50_000
        assert checkpoint_steps(run) == [0, 3]
        assert_metrics_are_complete_lines(run)
        assert message in run.log.read_text()
        resize(disk, 40_000_000)
        assert train(run, datasets_dir).returncode == 0
        assert_same_outcome(run, uninterrupted)


def test_lowering_keep_checkpoints_of_a_finished_run_takes_effect_at_the_next_start(
    uninterrupted: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    run = RunFolder(shutil.copytree(uninterrupted.path, tmp_path / "run", symlinks=True))
    before = checkpoint_steps(run)
    change(run, keep_checkpoints=1)
    assert train_here(run, datasets_dir, dry_run=True) == 0
    assert checkpoint_steps(run) == before
    assert train_here(run, datasets_dir) == 0
    assert checkpoint_steps(run) == [0, 7] != before


def test_a_start_warns_of_a_disk_that_is_too_small_and_makes_room(
    run: RunFolder,
    datasets_dir: Path,
    messages: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The disk has space for three checkpoints, but two are kept besides the best."""

    def usage(_: Path) -> SimpleNamespace:
        used = sum(map(folder_bytes, run.checkpoints.glob("*-step-*")))
        return SimpleNamespace(total=10**7, free=int(3.3 * CHECKPOINT_BYTES) - used)

    monkeypatch.setattr("shutil.disk_usage", usage)
    change(run, keep_checkpoints=3)
    assert train_here(run, datasets_dir) == 0
    assert "its checkpoints need" in messages.text
    assert "free some space, or lower keep_checkpoints" in messages.text
    assert "too little space for the next checkpoint; deleting" in messages.text
    assert checkpoint_steps(run)[-2:] == [6, 7]


@pytest.mark.long
def test_a_checkpoint_that_will_not_fit_is_not_started(
    run: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=10**6, free=CHECKPOINT_BYTES)
    monkeypatch.setattr("rungs.common.disk.shutil.disk_usage", lambda _: usage)
    monkeypatch.setattr(
        "rungs.checkpointing.checkpoint_folder.checkpoint_name",
        lambda *_: pytest.fail("was started"),
    )
    assert space_in(failure_message(run, datasets_dir))[1] == CHECKPOINT_BYTES


class AlmostFullFile:
    """A file that can grow by so many bytes."""

    def __init__(self, file: Any, space: int) -> None:
        self._file, self._space = file, space

    def write(self, content: memoryview) -> int:
        if not self._space:
            fail(errno.ENOSPC)
        written: int = self._file.write(content[: self._space])
        self._space -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@pytest.mark.long
def test_the_disk_is_full_for_a_line_of_metrics(
    run: RunFolder, uninterrupted: RunFolder, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        created = MetricsLog.__init__

        def create(self: MetricsLog, *arguments: Any) -> None:
            created(self, *arguments)
            self._file = AlmostFullFile(self._file, space=1425)  # type: ignore[assignment]

        patch.setattr(MetricsLog, "__init__", create)
        message = failure_message(run, datasets_dir)
    assert message.startswith(f"{run.metrics}: the metrics of step 4 could not be written: ")
    assert space_in(message)[0] < 400
    assert len(run.metrics.read_text().splitlines()) == 4
    assert_metrics_are_complete_lines(run)
    assert train_here(run, datasets_dir) == 0
    assert_same_outcome(run, uninterrupted)


@pytest.mark.long
def test_charts_and_log_that_cannot_be_written_do_not_stop_a_run(
    run: RunFolder, datasets_dir: Path
) -> None:
    (run.path / "loss-chart.png").mkdir()
    ended = train_with_fault("fill_disk_of_log", run, datasets_dir)
    assert ended.returncode == 0
    assert "Traceback" not in ended.stderr
    assert ended.stderr.count("train.log: could not be written: [Errno 28] No space left") == 1
    assert "charts: not drawn: " in ended.stderr
    assert checkpoint_steps(run) == [0, 3, 6, 7]


def test_the_disk_is_full_for_the_lock(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: fail(errno.ENOSPC))
    with pytest.raises(RunFailure, match="the lock of the run could not be written: No space"):
        run.lock().__enter__()

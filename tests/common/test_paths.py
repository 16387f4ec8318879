"""Files that are far too large for what they should be, which cost no memory."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import follow_link
from rungs.checkpointing.manifest import CheckpointError, read_checkpoint
from rungs.common import paths
from rungs.common.errors import RunFailure, UserError, system_error
from rungs.config.run_config import load_run
from rungs.data.builders.sections import LineSection
from rungs.data.chats.chat_template import read_template_files
from rungs.data.tokenizer_files import load_tokenizer
from rungs.run import metrics, records
from rungs.run.folder import RunFolder, read_note
from tests.faults.fuzzing import limited_memory

SIZE = 1 << 40
"""Of a sparse file, which takes no space."""


def huge(path: Path, size: int = SIZE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    os.truncate(path, size)
    return path


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("model.json", load_run),
        ("meta.json", read_checkpoint),
        ("tokenizer.json", load_tokenizer),
        ("best", lambda folder: follow_link(folder / "best")),
        ("chat_template.jinja", lambda folder: read_template_files(folder)),
        ("events.jsonl", lambda folder: records.read(RunFolder(folder), records.Event)),
    ],
)
def test_it_is_refused(name: str, read: Callable[[Path], Any], tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    huge(tmp_path / name)
    with pytest.raises((UserError, CheckpointError), match=r"1,099,511,627,776 bytes"):
        read(tmp_path)


def test_a_note_is_short(tmp_path: Path) -> None:
    assert read_note(huge(tmp_path / "holder.lock")) == ""


def test_lines_without_end_are_refused_or_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "MOST_LINE", 1000)
    file = huge(tmp_path / "metrics.jsonl", 10_000)
    assert list(metrics.stream(file, metrics.StepMetrics)) == []
    with pytest.raises(UserError, match="line 1 has 1,000 bytes or more"):
        list(LineSection.of_file(file).lines())


def test_a_line_without_end_in_a_growing_file_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    growing = paths.GrowingFile(path)
    path.write_bytes(b"one\n")
    assert list(growing.new_lines()) == [[b"one\n"]]
    with path.open("r+b") as file:
        file.truncate(400 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\ntwo\nthr")
    with limited_memory(250 << 20):
        found = [line for lines in growing.new_lines() for line in lines]
    assert found[-1] == b"two\n"
    assert len(found) == 2
    with path.open("ab") as file:
        file.write(b"ee\n")
    assert list(growing.new_lines()) == [[b"three\n"]]
    assert not growing.is_replaced
    assert list(growing.new_lines()) == []


def test_lack_of_memory_is_one_line() -> None:
    assert "memory does not suffice" in str(system_error(MemoryError()))
    loader = "libjax_common.so: failed to map segment from shared object"
    assert "memory that this process may use" in str(system_error(ImportError(loader)))
    assert "ulimit -u" in str(system_error(RuntimeError("can't start new thread")))
    xla = "RESOURCE_EXHAUSTED: Out of memory allocating 409599999960 bytes."
    assert "make the batch" in str(system_error(RuntimeError(xla)))
    assert system_error(ImportError("no module named jax")) is None


def test_a_full_disk_is_one_line_even_if_nobody_knows_the_file() -> None:
    error = system_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    assert isinstance(error, RunFailure)
    assert "No space left on device; free some space" in str(error)
    assert system_error(OSError(errno.EBADF, os.strerror(errno.EBADF))) is None


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_what_is_no_file_does_not_count_as_missing(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    assert paths.optional_file(path) is None
    make(path)
    with pytest.raises(UserError, match=r"tokenizer\.json: not a regular file"):
        paths.optional_file(path)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows asks for its folders otherwise")
def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as it does for an unnamed user
    assert paths.cache_folder() is None

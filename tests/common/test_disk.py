"""File systems that refuse to sync, that fail, or that don't tell their space."""

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest

from rungs.common import disk
from rungs.common.errors import RunFailure


def _fail_with(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fsync(_: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.os, "fsync", fsync)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_file_system_without_sync_is_used_without(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_with(monkeypatch, number)
    disk.sync_to_disk(tmp_path)
    with (tmp_path / "file").open("w") as file:
        disk.flush(file)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_sync_that_fails_is_an_error(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fail_with(monkeypatch, number)
    with pytest.raises(OSError, match=os.strerror(number)):
        disk.sync_to_disk(tmp_path)


@pytest.mark.parametrize(("needed", "text"), [(0, "("), (1000, "(1,000 bytes needed, ")])
def test_a_full_disk_says_how_much_is_needed_if_that_is_known(
    needed: int, text: str, tmp_path: Path
) -> None:
    failure = disk.write_failure(tmp_path, "x", OSError(errno.ENOSPC, ""), needed)
    assert f"No space left on device {text}" in str(failure)
    assert "bytes free there)" in str(failure)
    assert "0 bytes needed" not in str(failure).replace("1,000", "")


def test_a_disk_that_cannot_be_asked_is_taken_to_have_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("os.statvfs", fail)
    disk.check_free_space(tmp_path, "the checkpoint", 10**30)
    error = disk.write_failure(tmp_path, "the checkpoint", OSError(errno.ENOSPC, ""), 7)
    assert "No space left on device (7 bytes needed); free some space" in str(error)


def test_a_replaced_file_is_on_disk_before_it_has_its_name_and_its_name_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, synced = tmp_path / "file", list[tuple[str, str]]()
    file.write_text("before")
    monkeypatch.setattr(disk, "sync_to_disk", lambda at: synced.append((at.name, file.read_text())))
    disk.replace_file(file, "after")
    (unfinished, before), folder = synced
    assert unfinished.endswith(".new")
    assert (before, folder) == ("before", (tmp_path.name, "after"))


def test_a_file_that_cannot_be_synced_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("before")
    _fail_with(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.replace_file(tmp_path / "file", "after")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_pipe_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with (
            pytest.raises(RunFailure, match="could not be written: not a regular file"),
            disk.writing(path, "the page"),
        ):
            disk.replace_file(path, "page")
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert len(list(tmp_path.iterdir())) == 2

"""Files and folders appear complete or not at all; a full disk is told in bytes."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

import pytest

from rungs.common import disk
from rungs.common.errors import RunFailure, UserError


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def fail_to_sync(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    def fsync(_: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(disk.os, "fsync", fsync)


def test_a_file_system_without_sync_is_used_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_sync(monkeypatch, errno.EINVAL)
    disk.sync_to_disk(tmp_path)


def test_a_file_is_on_disk_before_it_has_its_name_and_its_name_after(
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
    fail_to_sync(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        disk.replace_file(tmp_path / "file", "after")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_folder_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, place = set[str](), tmp_path / "folder"

    def note(path: Path) -> None:
        if not place.exists():
            synced.add(path.name)

    monkeypatch.setattr(disk, "sync_to_disk", note)
    with disk.atomic_folder(place, replace=True) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("content")
    assert synced == {"inner", "file", ".folder.partial"}
    assert names(tmp_path) == ["folder"]


def test_a_folder_is_replaced_only_if_that_is_asked_for(tmp_path: Path) -> None:
    place = tmp_path / "folder"
    for content in ("one", "two"):
        with disk.atomic_folder(place, replace=True) as partial:
            (partial / "file").write_text(content)
    with (
        pytest.raises(UserError, match="folder: is there already; left unchanged"),
        disk.atomic_folder(place),
    ):
        pass
    assert (place / "file").read_text() == "two"
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize("resume", [False, True])
def test_a_failed_attempt_is_resumed_or_deleted(resume: bool, tmp_path: Path) -> None:
    place = tmp_path / "folder"

    def fill(folder: Path) -> None:
        (folder / "file").touch()
        raise KeyError

    with pytest.raises(KeyError), disk.atomic_folder(place, replace=True, resume=resume) as new:
        fill(new)
    assert names(tmp_path) == [".folder.partial"] * resume
    with disk.atomic_folder(place, replace=True, resume=resume) as new:
        assert names(new) == ["file"] * resume


def test_a_replacement_killed_between_its_renames_is_undone(tmp_path: Path) -> None:
    place = tmp_path / "folder"
    (tmp_path / ".folder.old").mkdir()
    with disk.lock_folder(place):
        assert names(tmp_path / "folder") == []
        disk.recover_folder(place)
    assert names(tmp_path) == ["folder"]


@pytest.mark.parametrize("folder", [disk.atomic_folder, disk.lock_folder])
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, RunFailure), (errno.EDQUOT, RunFailure), (errno.EACCES, UserError)],
)
def test_a_full_disk_is_no_wrong_input(
    folder: Any, number: int, kind: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(kind, match=os.strerror(number)), folder(tmp_path / "folder"):
        raise OSError(number, os.strerror(number))
    assert names(tmp_path) == []


def test_a_lock_ends_with_its_process_and_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    hold = "import pathlib, sys; from rungs.common import disk\n"
    hold += "with disk.lock_file(pathlib.Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", hold, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        holder.stdout.readline()
        with pytest.raises(BlockingIOError), disk.lock_file(path):
            pass
        holder.kill()
        with disk.lock_file(path, wait=True):
            pass


def test_what_is_on_another_disk_is_moved_by_copying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, rename = tmp_path / "a", tmp_path / "b", Path.rename
    (source / "in it").mkdir(parents=True)
    (source / "in it" / "file").write_text("content")

    def refuse(path: Path, to: Path) -> Path:
        if path == source:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", refuse)
    disk.move(source, target)
    assert (target / "in it" / "file").read_text() == "content"
    assert names(tmp_path) == ["b"]


@pytest.mark.parametrize(("needed", "text"), [(0, "("), (1000, "(1,000 bytes needed, ")])
def test_a_full_disk_says_how_much_is_needed_if_that_is_known(
    needed: int, text: str, tmp_path: Path
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    failure = disk.write_failure(tmp_path, "x", full, needed)
    assert f"x could not be written: No space left on device {text}" in str(failure)
    assert "bytes free there); free some space" in str(failure)


@pytest.mark.parametrize("text", ["[os_error_code='28']", "(os error 28)", "Disk quota exceeded"])
def test_a_full_disk_is_recognized_in_messages_of_libraries(text: str, tmp_path: Path) -> None:
    failure = disk.write_failure(tmp_path, "the checkpoint", ValueError(f"failed {text}"))
    assert "bytes free there); free some space" in str(failure)
    assert disk.reason_of_no_space(ValueError("failed")) is None


def test_a_disk_that_cannot_be_asked_is_taken_to_have_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("os.statvfs", fail)
    disk.check_free_space(tmp_path, "the checkpoint", 10**30)


def test_a_copy_needs_no_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_text("content")
    monkeypatch.setattr(os, "link", refuse)
    disk.copy(tmp_path / "folder", tmp_path / "copy", link=True)
    assert (tmp_path / "copy" / "inner" / "file").read_text() == "content"

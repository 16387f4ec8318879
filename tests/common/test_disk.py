"""File systems that refuse to sync, that fail, or that don't tell their space."""

import errno
import itertools
import os
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from rungs.common import disk
from rungs.common.errors import RunFailure, UserError


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


@pytest.mark.skipif(sys.platform == "win32", reason="Windows syncs no folders")
def test_a_folder_that_may_be_written_but_not_listed_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_ = os.open

    def refuse(path: Path, flags: int, *more: Any) -> int:
        if flags == os.O_RDONLY:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return open_(path, flags, *more)

    monkeypatch.setattr(disk.os, "open", refuse)
    disk.sync_to_disk(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(PermissionError):
        disk.sync_to_disk(tmp_path / "file")


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no statvfs")
def test_a_disk_without_room_for_another_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_favail=0, f_files=24, f_frsize=1, f_bavail=9, f_bfree=9, f_blocks=9)
    monkeypatch.setattr("os.statvfs", lambda _: full)
    failure = disk.write_failure(tmp_path, "x", OSError(errno.ENOSPC, ""), 1)
    assert "No space left on device for another file (inode)" in str(failure)
    full.f_files = 0  # a file system without a number of files
    assert "inode" not in str(disk.write_failure(tmp_path, "x", OSError(errno.ENOSPC, ""), 1))


def _refuse_to_rename(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Make a folder's content a lower layer of an overlay, or another mount of the same disk."""
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.parent == folder:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path))
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)


def test_what_cannot_be_renamed_is_moved_by_copying(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tmp_path / "a", tmp_path / "b"
    (source / "folder" / "in it").mkdir(parents=True)
    (source / "folder" / "in it" / "file").write_text("content")
    (source / "file").write_text("more")
    (source / "link").symlink_to("folder")
    (source / "broken").symlink_to("nothing")
    target.mkdir()
    _refuse_to_rename(monkeypatch, source)
    for name in ("folder", "file", "link", "broken"):
        disk.move(source / name, target / name)
    assert not list(source.iterdir())
    monkeypatch.setattr(disk, "sync_folder", lambda _: os.close(9_999))
    (source / "full").mkdir()
    with pytest.raises(OSError, match="Bad file"):
        disk.move(source / "full", target / "full")
    assert (source / "full").is_dir()
    assert sorted(path.name for path in target.iterdir()) == ["broken", "file", "folder", "link"]
    assert (target / "folder" / "in it" / "file").read_text() == "content"
    assert (target / "file").read_text() == "more"
    links = (target / "link", target / "broken")
    assert [str(link.readlink()) for link in links] == ["folder", "nothing"]


def test_what_cannot_be_renamed_is_deleted_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a" / "folder"
    folder.mkdir(parents=True)
    (folder / "file").touch()
    _refuse_to_rename(monkeypatch, folder.parent)
    disk.discard(folder)
    assert not list(folder.parent.iterdir())


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


@pytest.mark.parametrize("folder", [disk.create_folder, disk.lock_folder, disk.temporary_folder])
@pytest.mark.parametrize(
    ("number", "kind"),
    [(errno.ENOSPC, RunFailure), (errno.EDQUOT, RunFailure), (errno.EACCES, UserError)],
)
def test_a_full_disk_is_no_wrong_input(
    folder: Any, number: int, kind: type[Exception], tmp_path: Path
) -> None:
    parent = tmp_path / "new"
    parent.mkdir()
    place = parent if folder is disk.temporary_folder else parent / "folder"
    with pytest.raises(kind, match=os.strerror(number)), folder(place):
        raise OSError(number, os.strerror(number))
    assert list(parent.iterdir()) == []


@pytest.mark.parametrize(("is_limited", "number"), [(False, errno.ENOSPC), (True, errno.EFBIG)])
def test_a_short_write_of_numpy_is_a_full_disk_or_a_limit(
    is_limited: bool, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "limits_file_size", lambda: is_limited)
    full = pytest.raises(RunFailure, match=os.strerror(number))
    with full, disk.create_file(tmp_path / "new" / "file"):
        raise OSError("8192 requested and 4000 written")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_in_the_place_of_a_folder_stays(tmp_path: Path) -> None:
    place = tmp_path / "folder"
    place.write_text("mine")
    with (
        pytest.raises(UserError, match="folder: is there and is no folder; move it away"),
        disk.lock_folder(place),
        disk.replace_folder(place),
    ):
        pass
    assert place.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_link_is_replaced_by_a_folder_again_and_again(tmp_path: Path) -> None:
    elsewhere, place = tmp_path / "elsewhere", tmp_path / "folder"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("of others")
    for name in ("folder", ".folder.partial", ".folder.old"):
        (tmp_path / name).symlink_to(elsewhere)
    for content in ("one", "two"):
        with disk.lock_folder(place), disk.replace_folder(place) as partial:
            (partial / "file").write_text(content)
        assert (place / "file").read_text() == content
        assert not place.is_symlink()
    assert (elsewhere / "file").read_text() == "of others"
    assert not list(tmp_path.glob(".folder.*[dl]"))


def test_a_replaced_folder_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced = set[str]()
    place = tmp_path / "folder"

    def note(path: Path) -> None:
        if not place.exists():
            synced.add(path.name)

    monkeypatch.setattr(disk, "sync_to_disk", note)
    with disk.replace_folder(place) as partial:
        (partial / "inner").mkdir()
        (partial / "inner" / "file").write_text("content")
    assert synced == {"inner", "file", ".folder.partial"}


@pytest.mark.parametrize("link", [False, True])
def test_a_copy_needs_no_times_and_permissions(
    link: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File systems of other systems refuse to set them, and have no hard links."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    (tmp_path / "folder" / "inner").mkdir(parents=True)
    (tmp_path / "folder" / "inner" / "file").write_text("content")
    for name in ("link", "utime", "chmod"):
        monkeypatch.setattr(os, name, refuse)
    disk.copy(tmp_path / "folder", tmp_path / "copy", link=link)
    assert (tmp_path / "copy" / "inner" / "file").read_text() == "content"


def test_a_folder_whose_copy_does_not_fit_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_text("content")
    monkeypatch.setattr("shutil.copyfile", fail)
    with (
        pytest.raises(RunFailure, match=r"No space left on device .* free some space"),
        disk.writing(tmp_path, "a copy"),
    ):
        disk.copy(tmp_path / "folder", tmp_path / "copy")


def test_helpers_of_killed_processes_may_write_while_their_folder_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for _ in range(5):
        with disk.scratch_folder() as folder:
            run, has_begun = folder / "run", threading.Event()
            run.mkdir()
            helper = threading.Thread(target=_write_files, args=(run, has_begun), daemon=True)
            helper.start()
            has_begun.wait()
        helper.join()
    assert list(tmp_path.iterdir()) == []


def _write_files(folder: Path, has_begun: threading.Event) -> None:
    for number in itertools.count():
        try:
            (folder / f"{number}").touch()
        except FileNotFoundError:
            return
        if number == 100:
            has_begun.set()


@pytest.mark.parametrize("opened", [disk.open_to_append, disk.open_to_change])
def test_a_file_with_another_name_is_left_as_it_is_there(opened: Any, tmp_path: Path) -> None:
    """As in a backup by `cp -al`."""
    file, backup = tmp_path / "train.log", tmp_path / "backup.log"
    backup.write_text("one")
    file.hardlink_to(backup)
    with opened(file) as written:
        written.seek(0, os.SEEK_END)
        written.write(b" two")
    assert (file.read_text(), backup.read_text()) == ("one two", "one")
    assert set(tmp_path.iterdir()) == {file, backup}

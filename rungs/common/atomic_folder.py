"""Folders that appear complete or not at all, built by one process at a time; locks of files."""

import contextlib
import errno
import glob
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout

from rungs.common.disk import put_in_place, sync_to_disk
from rungs.common.errors import UserError, reason
from rungs.common.paths import is_there

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)

log = logging.getLogger("rungs")


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock to build or replace `folder`. Waits while another process holds it. A UserError
    in the block leaves no new lock file behind. Raises UserError if the folder cannot be written;
    an OSError raised in the block counts as that."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        path = _sibling(folder, "lock")
        is_new = not path.exists()
        lock = file_lock(path)
        try:
            held = lock.acquire(timeout=0)
        except Timeout:
            log.warning("%s: another process is building it; waiting", folder)
            held = lock.acquire()
        with held:
            _restore(folder)
            try:
                yield
            except UserError:
                if is_new and not is_there(_sibling(folder, "partial")):
                    path.unlink(missing_ok=True)  # processes that wait for it notice that
                raise
    except OSError as error:
        raise UserError(f"{folder}: cannot be built: {reason(error)}") from error


@contextlib.contextmanager
def replace_folder(folder: Path, *, resume: bool = False) -> Iterator[Path]:
    """Replace `folder` while `lock_folder` is held. Yields an empty folder beside it to fill, which
    becomes `folder` at the end. `resume` yields the partly filled folder of a failed attempt."""
    partial, old = _sibling(folder, "partial"), _sibling(folder, "old")
    if not resume:
        _remove(partial)
    partial.mkdir(exist_ok=resume)
    try:
        yield partial
        if folder.exists():
            folder.rename(old)
        put_in_place(partial, folder)
    except BaseException:
        _restore(folder)
        if not resume:
            _remove(partial)
        raise
    _remove(old)


def recover_folder(folder: Path) -> None:
    """Restore a folder whose replacement was interrupted between its two renames."""
    if is_there(_sibling(folder, "old")):
        with lock_folder(folder):
            pass


def _restore(folder: Path) -> None:
    """Undo a replacement that stopped between its two renames; delete an old folder left over."""
    old = _sibling(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    _remove(old)


def _sibling(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def create_folder(folder: Path) -> Iterator[Path]:
    """Create a new folder. Yields an empty folder to fill. When the block ends, it is synced to
    disk and takes the name `folder`; if the block raises, it is deleted. Raises UserError if the
    folder cannot be written (an OSError raised in the block counts as that), or something with its
    name was created in the meantime."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        for left in folder.parent.glob(f".{glob.escape(folder.name)}.*.partial"):
            log.warning("%s: left by an interrupted attempt; delete it unless one still runs", left)
        with tempfile.TemporaryDirectory(
            prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent
        ) as unfinished:
            new = Path(unfinished) / folder.name
            new.mkdir()
            yield new
            for path in new.rglob("*"):
                sync_to_disk(path)
            if os.path.lexists(folder):
                raise UserError(f"{folder}: just created by another process; left unchanged")
            put_in_place(new, folder)
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error.strerror or error}") from error


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty folder in `parent`, which is deleted at the end. Raises UserError if it cannot
    be written; an OSError raised in the block counts as that."""
    try:
        with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=parent) as folder:
            yield Path(folder)
    except OSError as error:
        raise UserError(f"{parent}: cannot be written: {error.strerror or error}") from error


def file_lock(path: Path) -> BaseFileLock:
    """Return the lock of a file. On file systems without locks, as on some clusters, the existence
    of another file is the lock; it outlives a process that was killed on another machine. Raises
    OSError if the file cannot be created."""
    if not (problem := _problem(path)):
        return FileLock(path)
    lock = path.with_name(f"{path.stem}.soft.lock")
    log.warning(
        "%s: its file system has no locks (%s), so %s tells that a process uses it; if one was"
        " killed on another machine, delete that file",
        *(path.parent, problem, lock.name),
    )
    return SoftFileLock(lock)


def _problem(path: Path) -> str:
    """Return why a file can't be locked, or an empty text if it can be or is locked."""
    if os.name != "posix":
        return ""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return os.strerror(error.errno) if error.errno in _NO_LOCKS else ""
    finally:
        os.close(descriptor)
    return ""

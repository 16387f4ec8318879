"""Writing files and folders with clear messages on failure: never through a link, which could lead
out of a folder from someone else; durable after a power cut where the system can promise it.
Folders appear complete or not at all, built by one process at a time."""

import contextlib
import errno
import glob
import logging
import math
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from filelock import Timeout

from rungs.common.errors import DISK_FULL, NO_SPACE, RunFailure, UserError, reason
from rungs.common.locks import file_lock
from rungs.common.machine import limits_file_size
from rungs.common.paths import is_file, is_folder, is_there

_GONE = (errno.ENOENT, errno.ENOTDIR, getattr(errno, "ESTALE", errno.ENOENT))
_REMEDIES: dict[int | None, str] = {
    **dict.fromkeys(_GONE, "restore what was removed or moved"),
    **dict.fromkeys(NO_SPACE, "free some space"),
    errno.EFBIG: "raise the limit on file size (ulimit -f)",
}
_NO_SUCH_OPERATION = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
UNFINISHED_FILES = f".*.{'[0-9a-f]' * 8}.new"
"""Pattern of files that `replace_file` leaves behind when the process is killed."""
DISCARDED = "-discarded"
"""End of the name of a folder while `discard` deletes it."""
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_SECONDS_WHILE_OPEN = 10.0
_SEEK_LOCK = threading.Lock()
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
"""What NumPy says of a full disk, or of a limit on file sizes."""
_NUMBER_IN_TEXT = re.compile(r"os[ _]error(?:_code)?\W+(\d+)", re.IGNORECASE)
"""The system's error number in messages of libraries not written in Python: `(os error 28)` in
safetensors, `[os_error_code='28']` in TensorStore."""
log = logging.getLogger("rungs")


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is durably on disk."""
    is_windows = sys.platform == "win32"  # syncs no folders, and no files open for reading only
    if is_windows and path.is_dir():
        return
    try:
        descriptor = os.open(path, os.O_RDWR if is_windows else os.O_RDONLY)
    except PermissionError:
        if path.is_dir():  # may be written to but not listed
            return
        raise
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until everything in a folder is durably on disk."""
    for path in folder.rglob("*"):
        sync_to_disk(path)


def _sync(descriptor: int) -> None:
    """Sync a file or folder; do nothing on file systems without that operation, such as some
    network file systems for folders."""
    try:
        if sys.platform == "darwin":  # where fsync doesn't wait for the drive: fsync(2)
            import fcntl

            with contextlib.suppress(OSError):  # not on every file system
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
                return
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SUCH_OPERATION:
            raise


def flush(file: IO[Any]) -> None:
    """Wait until everything written to an open file is durably on disk."""
    file.flush()
    _sync(file.fileno())


def open_to_append(path: Path, buffering: int = -1) -> BinaryIO:
    """Open or create a regular file to read and append. If it has another name by now, a hard link,
    as in a backup, that keeps its content. Raises OSError for anything else."""
    return open(path, "a+b", buffering, opener=_open_regular)


def open_to_change(path: Path) -> BinaryIO:
    """Like `open_to_append`, for an existing file whose content changes."""
    return open(path, "r+b", opener=_open_regular)


def open_to_read_at(path: Path) -> int:
    """Open a file for `read_at`; return its descriptor. Raises OSError."""
    return os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))


def read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Return `size` bytes of an open file, or fewer if it ends before. Raises OSError."""
    content = b""
    while len(content) < size:
        start, missing = offset + len(content), size - len(content)
        if hasattr(os, "pread"):
            more = os.pread(descriptor, missing, start)
        else:  # Windows
            with _SEEK_LOCK:
                os.lseek(descriptor, start, os.SEEK_SET)
                more = os.read(descriptor, missing)
        if not more:
            break
        content += more
    return content


def _open_regular(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | _NO_LINKS, 0o666)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        content = file.read()
    replace_file(Path(path), content)
    return os.open(path, flags | _NO_LINKS, 0o666)


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file's content, or a link, atomically, also under a power cut. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        with unfinished.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        put_in_place(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def put_in_place(unfinished: Path, path: Path) -> None:
    """Rename a complete file, or a folder whose files are synced, to its final name, durably.
    Replaces an existing file. Raises OSError, also if the target is a device or pipe: root could
    replace /dev/null for everyone."""
    if path.exists() and not (is_file(path) or is_folder(path)):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    sync_to_disk(unfinished)
    replace(unfinished, path)
    sync_to_disk(path.parent)


def replace(source: Path, target: Path) -> None:
    """Rename a file, folder or link; a file or link replaces one of that name. Raises OSError."""
    _once_closed(lambda: source.replace(target))


def rename(source: Path, target: Path) -> None:
    """Rename a file, folder or link to a name that nothing has. Raises OSError."""
    _once_closed(lambda: source.rename(target))


def remove(path: Path) -> None:
    """Delete a file, a folder with its contents, or a link but not its target, if there is one."""
    is_folder = path.is_dir() and not path.is_symlink()
    with contextlib.suppress(FileNotFoundError):
        _once_closed(lambda: shutil.rmtree(path) if is_folder else path.unlink())


def try_to_remove(path: Path) -> None:
    """Like `remove`, where it does no harm if something stays."""
    with contextlib.suppress(OSError):
        remove(path)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield an empty folder for temporary files, for processes that get killed. See `discard`."""
    folder = Path(tempfile.mkdtemp())
    try:
        yield folder
    finally:
        discard(folder)


def _once_closed(change: Callable[[], object]) -> None:
    """Rename or remove. Windows refuses that while any program, such as a virus scanner, has a file
    open, so try again there for a while."""
    deadline = time.monotonic() + (_SECONDS_WHILE_OPEN if sys.platform == "win32" else 0)
    while True:
        try:
            change()
            return
        except PermissionError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def move(source: Path, target: Path) -> None:
    """Move a file, a folder or a link to a name that nothing has, so that it appears there complete
    or not at all: also to another disk, to another mount of the same one, and from a lower layer of
    an overlay, such as a container's image."""
    try:
        rename(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        unfinished = target.with_name(f".{target.name}")
        remove(unfinished)
        try:
            _copy_to_move(source, unfinished)
            replace(unfinished, target)
        except OSError:
            try_to_remove(unfinished)
            raise
        sync_to_disk(target.parent)
        remove(source)


def _copy_to_move(source: Path, unfinished: Path) -> None:
    if source.is_symlink():
        unfinished.symlink_to(source.readlink())
        return
    copy(source, unfinished)
    sync_folder(unfinished)
    sync_to_disk(unfinished)


def discard(folder: Path) -> None:
    """Delete a folder, renaming it first where that is possible (see `move`), so that it isn't
    there in part, and although helpers of killed processes may still be writing into it. Raises
    OSError."""
    renamed = folder.with_name(f".{folder.name}{DISCARDED}")
    try:
        rename(folder, renamed)
    except OSError as error:
        if error.errno != errno.EXDEV:  # see `move`
            raise
        remove(folder)
    remove(renamed)


def copy(source: Path, target: Path, *, link: bool = False) -> None:
    """Copy a file, or a folder with its contents, but not times and permissions, which some file
    systems don't let one set. With `link`, files are hard-linked where that is possible: for files
    that are replaced and never modified. Raises OSError."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
        for path in source.iterdir():
            copy(path, target / path.name, link=link)
        return
    if link:
        with contextlib.suppress(OSError):
            os.link(source, target)
            return
    shutil.copyfile(source, target)


@contextlib.contextmanager
def writing(
    path: Path, what: str, needed_bytes: int = 0, failures: type[Exception] = OSError
) -> Iterator[None]:
    """Turn a failed write in the block into a `RunFailure` that explains it in one line. `what` is
    what the block writes at `path`, as in "the metrics of step 3"; `needed_bytes` is its size, if
    known; `failures` are the exceptions that count as a failed write."""
    try:
        yield
    except RunFailure:
        raise
    except failures as error:
        raise write_failure(path, what, error, needed_bytes) from error


def has_space(path: Path, needed_bytes: int) -> bool:
    """Return whether a folder's file system has enough free space, or does not report its size."""
    return free_bytes(path) >= needed_bytes


def free_bytes(path: Path) -> float:
    """Return the free space of a folder's file system; infinity if it does not report its size."""
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return math.inf
    return usage.free if usage.total else math.inf


def check_free_space(path: Path, what: str, needed_bytes: int) -> None:
    """Raise RunFailure if a folder's file system has too little free space. A file system that does
    not report its size passes."""
    if not has_space(path, needed_bytes):
        raise write_failure(path, what, OSError(errno.ENOSPC, ""), needed_bytes)


def _can_hold_more_files(folder: Path) -> bool:
    if sys.platform == "win32":
        return True
    try:
        status = os.statvfs(folder)
    except OSError:
        return True
    return status.f_favail > 0 or status.f_files == 0


def reason_of_no_space(error: Exception) -> str | None:
    """Return the system's words for an error of a full disk or exhausted quota, None for others."""
    number = _number_of(error)
    return os.strerror(number) if number is not None and number in NO_SPACE else None


def write_failure(path: Path, what: str, error: Exception, needed_bytes: int = 0) -> RunFailure:
    """Return the error that ends a run because something could not be written; see `writing`."""
    number = _number_of(error)
    if number is None and not path.exists():
        number = errno.ENOENT
    if number is None:
        why = f"{type(error).__name__}: {reason(error)}"
    else:
        why = getattr(error, "strerror", None) or os.strerror(number)
    remedy = _REMEDIES.get(number, "fix that")
    if number in DISK_FULL:
        existing = next(place for place in (path, *path.absolute().parents) if place.exists())
        if number == errno.ENOSPC and not _can_hold_more_files(existing):
            why, remedy = f"{why} for another file (inode), however small", "delete some files"
        free = free_bytes(existing)
        known = [f"{needed_bytes:,} bytes needed"] if needed_bytes else []
        known += [f"{free:,} bytes free there"] if math.isfinite(free) else []
        why += f" ({', '.join(known)})" if known else ""
    elif number == errno.ELOOP:
        why = f"it is a link, which is not followed ({getattr(error, 'filename', path)})"
    elif named := getattr(error, "filename", None):
        why += f" ({named})"
    return RunFailure(
        f"{path}: {what} could not be written: {why}; {remedy}, then run the same command again"
    )


def unwritable(path: Path, error: OSError, what: str = "a file of it") -> UserError | RunFailure:
    """Return the error for a place that can't be written to: RunFailure for a full disk, else
    UserError."""
    if _number_of(error) in DISK_FULL:
        return write_failure(path, what, error)
    return UserError(f"{path}: cannot be written to: {error.strerror or reason(error)}")


def _number_of(error: Exception) -> int | None:
    """Return the system's error number, even if a library gives it only in its message."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if _SHORT_WRITE.fullmatch(str(error)):
        return errno.EFBIG if limits_file_size() else errno.ENOSPC
    found = _NUMBER_IN_TEXT.search(str(error))
    return int(found[1]) if found else None


def folder_bytes(folder: Path) -> int:
    """Return the total size in bytes of the files in a folder, ignoring files deleted meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock to build or replace `folder`. Waits while another process holds it. An error in
    the block leaves no new lock file behind. Raises the error of `unwritable` if the folder
    cannot be written; an OSError raised in the block counts as that."""
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
            except (UserError, RunFailure, OSError):
                if is_new and not is_there(_sibling(folder, "partial")):
                    with contextlib.suppress(OSError):  # Windows: it is open
                        path.unlink()  # processes that wait for it notice that
                raise
    except OSError as error:
        raise unwritable(folder, error) from error


@contextlib.contextmanager
def replace_folder(folder: Path, *, resume: bool = False) -> Iterator[Path]:
    """Replace `folder` while `lock_folder` is held. Yields an empty folder beside it to fill, which
    becomes `folder` at the end. `resume` yields the partly filled folder of a failed attempt.
    Raises UserError if something else than a folder is there."""
    if is_there(folder) and not is_folder(folder):
        raise UserError(f"{folder}: is there and is no folder; move it away")
    partial, old = _sibling(folder, "partial"), _sibling(folder, "old")
    if not resume:
        try_to_remove(partial)
    partial.mkdir(exist_ok=resume)
    try:
        yield partial
        sync_folder(partial)
        if folder.exists():
            move(folder, old)
        put_in_place(partial, folder)
    except BaseException:
        _restore(folder)
        if not resume:
            try_to_remove(partial)
        raise
    try_to_remove(old)


def recover_folder(folder: Path) -> None:
    """Restore a folder whose replacement was interrupted between its two renames."""
    if is_there(_sibling(folder, "old")):
        with lock_folder(folder):
            pass


def _restore(folder: Path) -> None:
    """Undo a replacement that stopped between its two renames; delete an old folder left over."""
    old = _sibling(folder, "old")
    if old.exists() and not folder.exists():
        move(old, folder)
    try_to_remove(old)


def _sibling(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


@contextlib.contextmanager
def create_folder(folder: Path) -> Iterator[Path]:
    """Create a new folder. Yields an empty folder to fill. When the block ends, it is synced to
    disk and takes the name `folder`; if the block raises, it is deleted. Raises the error of
    `unwritable` if the folder cannot be written (an OSError raised in the block counts as that),
    UserError if something with its name was created in the meantime."""
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
            sync_folder(new)
            if os.path.lexists(folder):
                raise UserError(f"{folder}: just created by another process; left unchanged")
            put_in_place(new, folder)
    except OSError as error:
        raise unwritable(folder, error) from error


@contextlib.contextmanager
def temporary_folder(parent: Path) -> Iterator[Path]:
    """Yield an empty folder in `parent`, which is made if it is missing. It is deleted at the end.
    Raises the error of `unwritable` if it cannot be written; an OSError raised in the block counts
    as that."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".", suffix=".partial", dir=parent) as folder:
            yield Path(folder)
    except OSError as error:
        raise unwritable(parent, error) from error


@contextlib.contextmanager
def create_file(path: Path) -> Iterator[Path]:
    """Create a new file. Yields a path to write to. When the block ends, that file is synced to
    disk and takes the name `path`; if the block raises, it is deleted. Raises what `create_folder`
    does."""
    with temporary_folder(path.parent) as folder:
        yield folder / path.name
        if os.path.lexists(path):
            raise UserError(f"{path}: just created by another process; left unchanged")
        put_in_place(folder / path.name, path)

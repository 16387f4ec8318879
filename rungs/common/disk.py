"""Writing files and folders so that they appear complete or not at all, also after a power cut;
clear messages for a full disk; locks, which end with their process."""

import contextlib
import errno
import fcntl
import logging
import math
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rungs.common.errors import DISK_FULL, NO_SPACE, RunFailure, UserError, reason

_REMEDIES: dict[int | None, str] = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "restore what was removed or moved"),
    **dict.fromkeys(NO_SPACE, "free some space"),
    errno.EFBIG: "raise the limit on file size (ulimit -f)",
}
UNFINISHED_FILES = f".*.{'[0-9a-f]' * 8}.new"
"""Pattern of files that `atomic_file` leaves behind when the process is killed."""
DISCARDED = "-discarded"
"""End of the name of a folder while `discard` deletes it."""
log = logging.getLogger("rungs")


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is durably on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Wait until everything in a folder is durably on disk."""
    for path in folder.rglob("*"):
        sync_to_disk(path)


def flush(file: IO[Any]) -> None:
    """Wait until everything written to an open file is durably on disk."""
    file.flush()
    _sync(file.fileno())


def _sync(descriptor: int) -> None:
    try:
        if sys.platform == "darwin":  # where fsync doesn't wait for the drive: fsync(2)
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that can't
            raise


def read_at(descriptor: int, offset: int, size: int) -> bytes:
    """Return `size` bytes of an open file, or fewer if it ends before. Raises OSError."""
    content = b""
    while len(content) < size:
        more = os.pread(descriptor, size - len(content), offset + len(content))
        if not more:
            break
        content += more
    return content


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Create or replace a file: yields a path beside it to write to. When the block ends, that file
    is synced and takes the name `path`; if the block raises, it is deleted. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        yield unfinished
        put_in_place(unfinished, path)
    except BaseException:
        try_to_remove(unfinished)
        raise


def replace_file(path: Path, content: str | bytes) -> None:
    """Create or replace a file, atomically, also under a power cut. Raises OSError."""
    with atomic_file(path) as new:
        new.write_bytes(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def atomic_folder(folder: Path, *, replace: bool = False, resume: bool = False) -> Iterator[Path]:
    """Create a folder: yields an empty one beside it to fill. When the block ends, that is synced
    and takes the name `folder`; if the block raises, it is deleted. `replace` replaces a folder of
    that name; `resume` leaves a failed attempt for the next one. Both need the lock of
    `lock_folder`. Raises UserError if something is there already, and the error of `unwritable`, as
    also for an OSError in the block."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        kind = "partial" if replace or resume else f"{secrets.token_hex(4)}.partial"
        partial, old = _sibling(folder, kind), _sibling(folder, "old")
        if not resume:
            remove(partial)
        partial.mkdir(exist_ok=resume)
        try:
            yield partial
            sync_folder(partial)
            if replace and folder.is_dir():
                folder.rename(old)
            elif os.path.lexists(folder):
                raise UserError(f"{folder}: is there already; left unchanged")
            put_in_place(partial, folder)
        except BaseException:
            recover_folder(folder)
            if not resume:
                try_to_remove(partial)
            raise
        try_to_remove(old)
    except OSError as error:
        raise unwritable(folder, error) from error


def recover_folder(folder: Path) -> None:
    """Restore a folder whose replacement was interrupted between its two renames."""
    old = _sibling(folder, "old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    try_to_remove(old)


def put_in_place(unfinished: Path, path: Path) -> None:
    """Rename a complete file, or a folder whose files are synced, to its final name, durably.
    Replaces an existing file. Raises OSError."""
    sync_to_disk(unfinished)
    unfinished.replace(path)
    sync_to_disk(path.parent)


def _sibling(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}.{kind}")


@contextlib.contextmanager
def lock_file(path: Path, *, wait: bool = False) -> Iterator[IO[str]]:
    """Hold the lock of a file, which is created, and yield the open file. Raises BlockingIOError if
    another process holds it, unless `wait`; OSError if its file system has no locks."""
    mode = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
    while True:
        with path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, mode)
            if not path.exists() or not os.path.samestat(path.stat(), os.fstat(file.fileno())):
                continue  # the former holder deleted it
            yield file
            return


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock to build or replace `folder`, waiting while another process does. Raises the
    error of `unwritable`, as also for an OSError in the block."""
    path = _sibling(folder, "lock")
    with contextlib.ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(lock_file(path))
            except BlockingIOError:
                log.warning("%s: another process is building it; waiting", folder)
                stack.enter_context(lock_file(path, wait=True))
            stack.callback(path.unlink)
            recover_folder(folder)
            yield
        except OSError as error:
            raise unwritable(folder, error) from error


def remove(path: Path) -> None:
    """Delete a file, a folder with its contents, or a link but not its target, if there is one."""
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def try_to_remove(path: Path) -> None:
    """Like `remove`, where it does no harm if something stays."""
    with contextlib.suppress(OSError):
        remove(path)


def discard(folder: Path) -> None:
    """Delete a folder, renaming it first, so that it isn't there in part. Raises OSError."""
    renamed = folder.with_name(f".{folder.name}{DISCARDED}")
    folder.rename(renamed)
    remove(renamed)


def move(source: Path, target: Path) -> None:
    """Move a file or folder, also to another disk, so that it appears complete or not at all."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        unfinished = target.with_name(f".{target.name}")
        remove(unfinished)
        copy(source, unfinished)
        sync_folder(unfinished)
        put_in_place(unfinished, target)
        remove(source)


def copy(source: Path, target: Path, *, link: bool = False) -> None:
    """Copy a file, or a folder with its contents, without times and permissions. With `link`, files
    are hard-linked where that is possible: for files that are replaced and never modified. Raises
    OSError."""
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
    if free_bytes(path) < needed_bytes:
        raise write_failure(path, what, OSError(errno.ENOSPC, ""), needed_bytes)


def reason_of_no_space(error: Exception) -> str | None:
    """Return the system's words for an error of a full disk or exhausted quota, None for others."""
    number = _number_of(error)
    return os.strerror(number) if number is not None and number in NO_SPACE else None


def _number_of(error: Exception) -> int | None:
    """Return the system's error number. Of a full disk, libraries may have it in the message only:
    TensorStore as `[os_error_code='28']`, safetensors as `(os error 28)`."""
    for number in DISK_FULL:
        signs = os.strerror(number), f"os_error_code='{number}'", f"(os error {number})"
        if any(sign in str(error) for sign in signs):
            return number
    return error.errno if isinstance(error, OSError) else None


def write_failure(path: Path, what: str, error: Exception, needed_bytes: int = 0) -> RunFailure:
    """Return the error that ends a run because something could not be written; see `writing`."""
    number = _number_of(error)
    if number is None and not path.exists():
        number = errno.ENOENT
    why = f"{type(error).__name__}: {reason(error)}" if number is None else os.strerror(number)
    if number in DISK_FULL:
        place = next(place for place in (path, *path.absolute().parents) if place.exists())
        known = [f"{needed_bytes:,} bytes needed"] if needed_bytes else []
        known += [f"{free:,} bytes free there"] if math.isfinite(free := free_bytes(place)) else []
        why += f" ({', '.join(known)})" if known else ""
    elif named := getattr(error, "filename", None):
        why += f" ({named})"
    remedy = _REMEDIES.get(number, "fix that")
    return RunFailure(
        f"{path}: {what} could not be written: {why}; {remedy}, then run the same command again"
    )


def unwritable(path: Path, error: OSError, what: str = "a file of it") -> UserError | RunFailure:
    """Return the error for a place that can't be written to: RunFailure for a full disk, else
    UserError."""
    if error.errno in DISK_FULL:
        return write_failure(path, what, error)
    return UserError(f"{path}: cannot be written to: {error.strerror or reason(error)}")


def folder_bytes(folder: Path) -> int:
    """Return the total size in bytes of the files in a folder, ignoring files deleted meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() else 0
    return total

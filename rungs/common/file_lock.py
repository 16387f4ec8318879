"""The lock of a file, which ends with the process that holds it."""

import errno
import logging
import os
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)

log = logging.getLogger("rungs")


def file_lock(path: Path) -> BaseFileLock:
    """Return the lock of a file. Where the file system has no locks, as some of clusters don't, the
    existence of another file is the lock. It outlives a process that was killed on another machine.
    Raises OSError if the file cannot be created."""
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
    """Return why a file can't be locked, an empty text if it can or is."""
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

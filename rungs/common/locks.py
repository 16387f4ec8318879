"""Locks of files, which end with their process."""

import errno
import logging
import os
import sys
from pathlib import Path

from filelock import BaseFileLock, FileLock, SoftFileLock

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL)
log = logging.getLogger("rungs")


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
    if sys.platform == "win32":  # all its file systems have locks
        return ""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return os.strerror(error.errno) if error.errno in _NO_LOCKS else ""
    finally:
        os.close(descriptor)
    return ""

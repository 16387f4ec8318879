"""Files and folders that outlive the machine, where the system can promise it; and what is said
where they cannot be written."""

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rungs.common.errors import RunFailure

FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC), errno.EFBIG)
"""Errors of a full disk, an exhausted quota, a limit on the size of files."""
GONE = (errno.ENOENT, errno.ENOTDIR, getattr(errno, "ESTALE", errno.ENOENT))
_NUMBER_IN_TEXT = re.compile(r"os[ _]error(?:_code)?\W+(\d+)", re.IGNORECASE)
"""How libraries that are not written in Python name the system's error: `(os error 28)` in
safetensors, `[os_error_code='28']` in TensorStore."""


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, would survive a power cut."""
    if path.is_dir() and os.name != "posix":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush(file: IO[Any]) -> None:
    """Wait until what was written to an open file would survive a power cut."""
    file.flush()
    os.fsync(file.fileno())


def link_or_copy(source: str, target: str) -> None:
    """Hard-link a file, or copy it where the file system cannot: for `shutil.copytree`, of files
    that are replaced and never written to."""
    with contextlib.suppress(OSError):
        os.link(source, target)
        return
    shutil.copy2(source, target)


@contextlib.contextmanager
def writing(
    path: Path, what: str, needed_bytes: int = 0, failures: type[Exception] = OSError
) -> Iterator[None]:
    """Say in a line why something could not be written.

    Args:
        path: where it was to be written.
        what: it is, as in «the metrics of step 3».
        needed_bytes: that it takes, where that is known.
        failures: what is told so when it is raised within the block.

    Raises:
        RunFailure: instead of those.
    """
    try:
        yield
    except RunFailure:
        raise
    except failures as error:
        raise write_failure(path, what, error, needed_bytes) from error


def check_free_space(path: Path, what: str, needed_bytes: int) -> None:
    """Raises RunFailure where the file system of a folder has fewer bytes free than are needed. One
    that does not say how large it is has room."""
    usage = shutil.disk_usage(path)
    if usage.total and usage.free < needed_bytes:
        raise write_failure(path, what, OSError(errno.ENOSPC, ""), needed_bytes)


def write_failure(path: Path, what: str, error: Exception, needed_bytes: int = 0) -> RunFailure:
    """What ends a run where something could not be written, as `writing`."""
    number = _number_of(error)
    if number is None and not path.exists():
        number = errno.ENOENT
    if number is None:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    else:
        reason = os.strerror(number)
    if number in FULL:
        reason += f" ({needed_bytes:,} bytes needed, {_free_bytes(path):,} free there)"
    elif named := getattr(error, "filename", None):
        reason += f" ({named})"
    return RunFailure(
        f"{path}: {what} could not be written: {reason}; {_remedy(number)}, then run the same"
        " command, which goes on from the last checkpoint"
    )


def _number_of(error: Exception) -> int | None:
    """The system's number of an error, also where a library only writes it into a text."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    found = _NUMBER_IN_TEXT.search(str(error))
    return int(found[1]) if found else None


def _remedy(number: int | None) -> str:
    if number == errno.EFBIG:
        return "raise the limit on the size of files (ulimit -f)"
    if number in FULL:
        return "make room"
    if number in GONE:
        return "bring back what was removed or moved"
    return "see to that"


def _free_bytes(path: Path) -> int:
    """Free on the file system that a path is on, or would be."""
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free

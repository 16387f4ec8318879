"""Paths that a user or a file gives: looked at so that no name and no kind of file is a surprise.

`pathlib` raises where a name is too long, holds a NUL or lies in a folder that is closed to us; and
opening a pipe or a device may wait, or read, for ever.
"""

import errno
import os
import stat
from pathlib import Path

_NAME_BYTES = 200
"""Below the 255 that file systems have, for what we put before and after a name."""


def checkout() -> Path | None:
    """Return the project's checkout that this package runs from, None where it was installed."""
    root = Path(__file__).parents[2]
    return root if (root / "train.py").is_file() else None


def is_file(path: Path | str) -> bool:
    """Whether a regular file is there."""
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: Path | str) -> bool:
    """Whether a folder is there."""
    return os.path.isdir(path)  # noqa: PTH112


def is_there(path: Path | str) -> bool:
    """Whether anything is there, were it a link that leads nowhere."""
    return os.path.lexists(path)


def require_regular(path: Path) -> None:
    """Raises OSError where a path leads to no file, or to a folder, a pipe or a device."""
    try:
        mode = path.stat().st_mode
    except ValueError:
        raise OSError(errno.EINVAL, "no possible name of a file", str(path)) from None
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def is_inside(path: str) -> bool:
    """Whether a relative path that a file names, with slashes, stays below where it starts."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)


def is_plain_name(name: str) -> bool:
    """Whether a name is that of something right in a folder, and leads nowhere else on any
    system."""
    return (
        name.isprintable()
        and not name.startswith("~")
        and name not in ("", ".", "..")
        and not set(name) & set('/\\:*?"<>|')
        and len(name.encode()) <= _NAME_BYTES
    )

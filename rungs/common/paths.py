"""Checks of paths that come from a user or a file; reading a file that grows."""

import contextlib
import hashlib
import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import platformdirs

from rungs.common.errors import UserError

_NAME_BYTES = 200
"""Longest name in bytes. File systems allow 255, but Rungs adds prefixes and suffixes."""
_LINES_AT_ONCE = 2_000
PACKAGED = Path(__file__).parents[1] / "shipped"
"""Where the wheel has `runs/` and `schemas/`; see `pyproject.toml`."""


def checkout() -> Path | None:
    """Return the checkout of Rungs that this package runs from, or None if it is installed."""
    root = Path(__file__).parents[2]
    return root if (root / "train.py").is_file() else None


def shipped() -> Path:
    """Return the folder with the runs and schemas that come with Rungs: the checkout, or a folder
    of the installed package."""
    return checkout() or PACKAGED


def cache_folder() -> Path | None:
    """Return the user's folder for what can be made again, which may not exist; None without a home
    folder, as of a container's user without a name, or if a variable names a relative one."""
    try:
        folder = Path(platformdirs.user_cache_dir("rungs"))
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None


@contextlib.contextmanager
def open_given(path: Path) -> Iterator[BinaryIO]:
    """Open a file that the user named, to be read in the block. Raises UserError if it is missing
    or unreadable, or a pipe, as it is read more than once."""
    if path.is_fifo():
        raise UserError(f"{path}: cannot be read: it is a pipe; write it to a file first")
    try:
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def refuse_other_content(path: Path, begins: bytes, what: str) -> None:
    """Raise UserError if a file exists whose content does not begin with `begins`, as a `what`
    does: writing a `what` there would destroy something else."""
    if path.is_file():
        with path.open("rb") as file:
            if file.read(len(begins)) not in (begins, b""):
                raise UserError(
                    f"{path}: is there and is not {what}; choose another name, or move it away"
                )


def file_checksum(path: Path) -> str | None:
    """Return the sha256 of a file, None if it is missing. Raises OSError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None


def refuse_link_out(path: Path, top: Path | None = None) -> None:
    """Raise UserError if a path is a link that leads out of its folder, or out of `top`, an
    enclosing folder. In the hub's cache, snapshots link to the `blobs` beside `snapshots`."""
    folder, target = (top or path.parent).resolve(), path.resolve()
    inside = (folder, *folder.parents)
    blobs = [place.parents[1] / "blobs" for place in inside if place.parent.name == "snapshots"]
    if not any(target.is_relative_to(place) for place in (folder, *blobs)):
        raise UserError(
            f"{path}: is a link out of its folder, to {target}; put the file there instead"
        )


def is_inside(path: str) -> bool:
    """Whether a relative path with slashes stays inside the folder it starts from."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & set(parts)


def is_plain_name(name: str) -> bool:
    """Whether a name is a plain file name, without a folder."""
    return (
        name.isprintable()
        and not name.startswith("~")
        and name not in ("", ".", "..")
        and not set(name) & set('/\\:*?"<>|')
        and len(name.encode()) <= _NAME_BYTES
    )


class GrowingFile:
    """A file of lines that another process appends to; it may not exist yet. `is_replaced` tells
    that it was replaced, truncated or removed since the last call, so earlier lines are void."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_replaced = False
        self._inode, self._offset = 0, 0

    def new_lines(self) -> Iterator[list[bytes]]:
        """Yield the complete lines added since the last call, in lists of some thousands; all lines
        if the file was replaced."""
        if not self.path.is_file():
            self.is_replaced = self._offset > 0
            self._inode, self._offset = 0, 0
            return
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            self.is_replaced = self._offset > 0 and (
                status.st_ino != self._inode or status.st_size < self._offset
            )
            self._inode = status.st_ino
            if self.is_replaced:
                self._offset = 0
            file.seek(self._offset)
            while lines := [line for line in islice(file, _LINES_AT_ONCE) if line.endswith(b"\n")]:
                self._offset += sum(map(len, lines))
                yield lines

"""Checks of paths that come from a user or a file; reading a file that grows. `pathlib` raises on
names that are too long or contain a NUL, and in folders without permission; opening a pipe or
device may block forever."""

import contextlib
import errno
import hashlib
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import IO, AnyStr, BinaryIO

import platformdirs

from rungs.common.errors import UserError, readable_line

NO_FILE = (
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR),
    *(errno.EINVAL, errno.ELOOP, errno.ENAMETOOLONG),
)
"""Error numbers of reading where there is no regular file. Others, such as EIO, may pass."""
_NAME_BYTES = 200
"""Longest name in bytes. File systems allow 255, but Rungs adds prefixes and suffixes."""
_RESERVED = re.compile(
    r'(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\..*)?|.*[. ]|.*[:*?"<>|].*',
    re.IGNORECASE,
)
"""https://learn.microsoft.com/en-us/windows/win32/fileio/naming-a-file"""
_LINES_AT_ONCE = 2_000
MOST_BYTES = 1 << 30
"""Of a file that is read at once; one of weights, tokens or texts never is."""
MOST_LINE = 1 << 26


def checkout() -> Path | None:
    """Return the checkout of Rungs that this package runs from, or None if it is installed."""
    root = Path(__file__).parents[2]
    return root if (root / "train.py").is_file() else None


def cache_folder() -> Path | None:
    """Return the user's folder for what can be made again, which may not exist; None without a home
    folder, as of a container's user without a name, or if a variable names a relative one."""
    try:
        folder = Path(platformdirs.user_cache_dir("rungs"))
    except RuntimeError:
        return None
    return folder if folder.is_absolute() else None


def is_file(path: Path | str) -> bool:
    """Whether a path is a regular file. Raises UserError if permissions hide that."""
    return stat.S_ISREG(_mode(path))


def optional_file(path: Path) -> Path | None:
    """Return a path, None if nothing is there. Raises UserError unless it is a regular file."""
    mode = _mode(path)
    if mode and not stat.S_ISREG(mode):
        raise UserError(f"{path}: not a regular file")
    return path if mode else None


def is_folder(path: Path | str) -> bool:
    """Whether a path is a folder. Raises UserError if permissions hide that."""
    return stat.S_ISDIR(_mode(path))


def is_link(path: Path | str) -> bool:
    """Whether a path is a symbolic link. Raises UserError if permissions hide that."""
    return stat.S_ISLNK(_mode(path, follow_links=False))


def is_there(path: Path | str) -> bool:
    """Whether a path exists, possibly as a broken link. Raises UserError if permissions hide
    that."""
    return _mode(path, follow_links=False) > 0


def _mode(path: Path | str, follow_links: bool = True) -> int:
    """Return the mode of what is at a path, 0 if there is nothing."""
    try:
        return os.stat(path, follow_symlinks=follow_links).st_mode  # noqa: PTH116
    except PermissionError as error:  # what can't be seen may not count as missing
        folders = reversed(Path(path).parents)
        hidden_by = next((folder for folder in folders if not os.access(folder, os.X_OK)), path)
        raise cannot_be_read(Path(hidden_by), error) from None
    except (OSError, ValueError):
        return 0


def require_regular(path: Path) -> None:
    """Raise OSError unless a path is a regular file (not missing, nor a folder, pipe or device)."""
    try:
        mode = path.stat().st_mode
    except ValueError:
        raise OSError(errno.EINVAL, "not a valid file name", str(path)) from None
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file. Raises UserError if it is larger than `MOST_BYTES`,
    OSError if it can't be read."""
    require_regular(path)
    if (size := path.stat().st_size) > MOST_BYTES:
        raise UserError(f"{path}: {size:,} bytes are too many for a file of its kind")
    return path.read_bytes()


def lines_of(file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yield the lines of an open file; a longer one than `MOST_LINE` in parts."""
    return iter(lambda: file.readline(MOST_LINE), file.read(0))


@contextlib.contextmanager
def open_given(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file that the user named, to be read in the block. Raises UserError if it is
    missing or unreadable."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            yield file
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None


def open_to_read(path: Path) -> BinaryIO:
    """Open an existing file. Raises UserError if it can't be read."""
    try:
        return path.open("rb")
    except OSError as error:
        raise cannot_be_read(path, error) from None


def suffix_of(name: Path | str) -> str:
    """Return the last suffix of a file's name in lower case, as some systems write them in upper
    case; empty if there is none."""
    return Path(name).suffix.lower()


def refuse_other_content(path: Path, begins: bytes, what: str) -> None:
    """Raise UserError if a file exists whose content does not begin with `begins`, as a `what`
    does: writing a `what` there would destroy something else."""
    if is_file(path):
        with open_to_read(path) as file:
            if file.read(len(begins)) not in (begins, b""):
                raise UserError(
                    f"{path}: is there and is not {what}; choose another name, or move it away"
                )


def cannot_be_read(path: Path, error: OSError) -> UserError:
    """Return the error for something that exists but cannot be read, maybe only for now."""
    return UserError(f"{path}: cannot be read just now: {error.strerror}; try again when it can be")


def path_of(descriptor: int) -> Path | None:
    """Return the current path of an open folder; None if it was removed, or not on Linux."""
    with contextlib.suppress(OSError):
        place = Path(f"/proc/self/fd/{descriptor}").readlink()
        return place if place.is_dir() else None
    return None


def file_checksum(path: Path) -> str | None:
    """Return the sha256 of a file, None if it is missing. Raises UserError if it cannot be read."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        raise cannot_be_read(path, error) from None


def refuse_unsearchable(folder: Path) -> None:
    """Raise UserError if a folder may not be searched, as everything in it would seem missing."""
    if is_folder(folder) and not os.access(folder, os.X_OK):
        raise cannot_be_read(folder, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def refuse_control_characters(path: Path | str) -> None:
    """Raise UserError if a path has a line break or another control character, or is not UTF-8:
    messages, logs and the libraries that read and write files need text."""
    if {"Cc", "Cs", "Zl", "Zp"} & set(map(unicodedata.category, str(path))):
        raise UserError(
            f"{readable_line(str(path))}: has a line break, another control character, or bytes"
            " that are not UTF-8; rename it"
        )


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
    """Whether a name is a plain file name on every system, without a folder."""
    return (
        name.isprintable()
        and not name.startswith("~")
        and name not in ("", ".", "..")
        and not set(name) & set('/\\:*?"<>|')
        and len(name.encode()) <= _NAME_BYTES
        and not is_reserved(name)
    )


def is_reserved(name: str) -> bool:
    """Whether Windows, if this is it, gives a file name another meaning or changes it."""
    return sys.platform == "win32" and bool(_RESERVED.fullmatch(name))


class GrowingFile:
    """A file of lines that another process appends to; it may not exist yet. `is_replaced` tells
    that it was replaced, truncated or removed since the last call, so earlier lines are void."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_replaced = False
        self._inode, self._offset = 0, 0

    def new_lines(self) -> Iterator[list[bytes]]:
        """Yield the complete lines added since the last call, in lists of some thousands; all lines
        if the file was replaced. Of a longer line than `MOST_LINE` only the end counts. Raises
        UserError if it exists and can't be read."""
        if not is_file(self.path):
            self.is_replaced = self._offset > 0
            self._inode, self._offset = 0, 0
            return
        with open_to_read(self.path) as file:
            status = os.fstat(file.fileno())
            self.is_replaced = self._offset > 0 and (
                status.st_ino != self._inode or status.st_size < self._offset
            )
            if self.is_replaced:
                self._offset = 0
            self._inode = status.st_ino
            file.seek(self._offset)
            complete = self._complete_lines(file)
            while lines := list(islice(complete, _LINES_AT_ONCE)):
                yield lines

    def _complete_lines(self, file: BinaryIO) -> Iterator[bytes]:
        for line in lines_of(file):
            is_complete = line.endswith(b"\n")
            if not is_complete and len(line) < MOST_LINE:  # still being written, or torn
                return
            self._offset += len(line)
            if is_complete:
                yield line

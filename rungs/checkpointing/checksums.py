"""Checksums of files, and `SHA256SUMS`, in which an import records those of its files.

It has the format of the command `sha256sum`, so `sha256sum --check SHA256SUMS` reads it too.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from rungs.common.paths import NO_FILE, cannot_be_read, is_plain_name, require_regular
from rungs.common.strict_json import read_text

CHECKSUMS_FILE = "SHA256SUMS"


def file_checksum(path: Path) -> str | None:
    """Return the sha256 of a file, None if there is none; raises UserError if it cannot be read."""
    try:
        require_regular(path)
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        if error.errno in NO_FILE:
            return None
        raise cannot_be_read(path, error) from None


def write_checksums(folder: Path) -> None:
    """Write the checksums of a folder's files into its `SHA256SUMS`."""
    names = sorted(path.name for path in folder.iterdir())
    lines = [f"{file_checksum(folder / name)}  {name}\n" for name in names]
    (folder / CHECKSUMS_FILE).write_text("".join(lines), encoding="utf-8")


def read_checksums(folder: Path) -> dict[str, str]:
    """Return the checksums in a folder's `SHA256SUMS`, by file name. Raises UserError if it is
    missing or cannot be read."""
    lines = read_text(folder / CHECKSUMS_FILE).splitlines()
    pairs = (line.split("  ", 1)[::-1] for line in lines if "  " in line)
    return {name: checksum for name, checksum in pairs if is_plain_name(name)}


def changed_files(folder: Path, of: Callable[[str], bool] = lambda _: True) -> list[str]:
    """Return the names of files that are missing or differ from their checksum in `SHA256SUMS`.

    Args:
        of: tells by a file's name whether to check it.
    """
    saved = read_checksums(folder)
    return [name for name in saved if of(name) and file_checksum(folder / name) != saved[name]]

"""Links to folders, or what replaces them: Windows makes symlinks only with a privilege, and can't
replace those to folders."""

import contextlib
import sys
from pathlib import Path

from rungs.common import disk


def link_folder(link: Path, target: Path) -> None:
    """Make a link to a folder. Raises OSError if the system refuses, as Windows may."""
    link.symlink_to(target, target_is_directory=True)


def point(link: Path, name: str) -> None:
    """Make or change a link to a folder beside it, atomically. Where that isn't possible, it is a
    text file with the folder's name. Raises OSError."""
    new = link.with_name(f".{link.name}")
    disk.remove(new)
    if not _is_linked(new, name):
        disk.replace_file(new, name + "\n")
    if sys.platform == "win32" and link.is_symlink():  # of a run from another system
        link.unlink()
    disk.replace(new, link)


def _is_linked(link: Path, name: str) -> bool:
    if sys.platform != "win32":
        with contextlib.suppress(OSError):
            link_folder(link, Path(name))
            return True
    return False

"""The links `best` and `latest` in a run's `checkpoints/`: kept up to date and followed."""

from pathlib import Path

from rungs.checkpointing.checkpoint_folder import (
    UNFINISHED,
    best_of,
    list_checkpoints,
    time_stamp,
)
from rungs.common import disk
from rungs.common.errors import UserError
from rungs.common.paths import is_file, is_folder, is_plain_name
from rungs.common.shown_text import quoted

BEST, LATEST = "best", "latest"


def update_links(folder: Path) -> None:
    """Point `best` and `latest` at the checkpoints they stand for now."""
    checkpoints = list_checkpoints(folder)
    latest = checkpoints[-1] if checkpoints else None
    for name, target in ((BEST, best_of(checkpoints)), (LATEST, latest)):
        if target is not None:
            _point(folder / name, target.folder.name)


def _point(link: Path, target: str) -> None:
    """Make `link` a relative symlink to `target`, or a text file that names it, atomically."""
    new = link.with_name(UNFINISHED + link.name)
    new.unlink(missing_ok=True)
    try:
        new.symlink_to(target, target_is_directory=True)
    except OSError:
        disk.replace_file(new, target + "\n")
    if link.is_dir() and not link.is_symlink():  # the run was copied with links followed
        aside = link.parent.parent / "aside"
        aside.mkdir(exist_ok=True)
        link.rename(aside / f"{time_stamp()}-{link.name}")
    new.replace(link)


def link_target(link: Path) -> str | None:
    """Return the name of the checkpoint that a link points to, None if there is none."""
    target = follow_link(link)
    return target.resolve().name if is_folder(target) else None


def follow_link(path: Path) -> Path:
    """Return `path` with `best` or `latest` in it resolved if that is a text file."""
    for pointer in (path, *path.parents):
        if pointer.name in (BEST, LATEST) and is_file(pointer):
            name = pointer.read_bytes().decode(errors="replace").strip()
            if not is_plain_name(name):
                raise broken_link(pointer)
            return pointer.parent / name / path.relative_to(pointer)
    return path


def broken_link(link: Path) -> UserError:
    return UserError(
        f"{link}: does not point to a checkpoint; choose one in {link.parent}, or repair the link"
        f" by starting the run: uv run train.py {quoted(link.parent.parent)}"
    )

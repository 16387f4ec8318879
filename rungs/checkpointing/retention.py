"""Which checkpoints of a run are deleted, and when. After each save the newest `keep_checkpoints`
and the best one for each set of validation data remain. More are deleted if the next one would not
fit on the disk. Only folders named like checkpoints are; users' own copies beside them stay."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.manifest import Checkpoint
from rungs.common import disk
from rungs.common.run_log import log


def most_needed(keep: int) -> int | None:
    """Return how many checkpoints must fit on the disk at once, None if all are kept: the one being
    written, the best, and the newest `keep` − 1 others, but at least one."""
    return None if keep == -1 else max(keep, 2) + 1


def delete_old(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and the best ones; none if `keep` is -1."""
    _delete(superfluous(checkpoint_folder.list_checkpoints(folder), keep))


def superfluous(checkpoints: list[Checkpoint], keep: int) -> list[Checkpoint]:
    """Return the checkpoints to delete if the newest `keep` and the best ones stay. `checkpoints`
    must be ordered by step; a `keep` of -1 keeps all."""
    best = checkpoint_folder.best_by_validation_data(checkpoints).values()
    older = checkpoints[:-keep] if keep > 0 else []
    return [old for old in older if old not in best]


def make_room(folder: Path, keep: int, needed_bytes: int) -> None:
    """Delete old checkpoints if the next one would not fit on the disk: all but the newest `keep` -
    1 (at least one), then as many more as needed, oldest first, if that is enough. The best ones
    and the newest valid one are never deleted."""
    if keep == -1 or disk.has_space(folder, needed_bytes):
        return
    checkpoints = checkpoint_folder.list_checkpoints(folder)
    newest = checkpoint_folder.newest_valid(folder)
    due = [one for one in superfluous(checkpoints, max(keep - 1, 1)) if one != newest]
    kept = [one for one in superfluous(checkpoints, 1) if one not in (*due, newest)]
    _delete_for_room(folder, due)
    missing = needed_bytes - disk.free_bytes(folder)
    sizes = {one.folder: disk.folder_bytes(one.folder) for one in kept}
    if missing <= sum(sizes.values()):
        while missing > 0:
            oldest = kept.pop(0)
            _delete_for_room(folder, [oldest])
            missing -= sizes[oldest.folder]


def _delete_for_room(folder: Path, old: list[Checkpoint]) -> None:
    if old:
        names = ", ".join(checkpoint.folder.name for checkpoint in old)
        log.warning("%s: too little space for the next checkpoint; deleting %s", folder, names)
    _delete(old)


def _delete(checkpoints: Iterable[Checkpoint]) -> None:
    for checkpoint in checkpoints:
        with contextlib.suppress(FileNotFoundError):  # already deleted by the user
            disk.discard(checkpoint.folder)


def clean_up(folder: Path) -> None:
    """Delete what a crash left half-written or half-deleted, and update the links."""
    for path in checkpoint_folder.unfinished_checkpoints(folder):
        disk.remove(path)
    checkpoint_folder.update_links(folder)

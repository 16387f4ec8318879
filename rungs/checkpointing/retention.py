"""Which checkpoints of a run are deleted, and when. After each save the newest `keep_checkpoints`
and the best one for each set of validation data remain. More are deleted if the next one would not
fit on the disk, or the disk or a quota turns out to be full."""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.manifest import Checkpoint
from rungs.common import disk
from rungs.common.run_log import log


def most_needed(keep: int) -> int | None:
    """Return how many checkpoints must fit on the disk at once, None if all are kept: the newest
    `keep` including the one being written, but at least one besides it, and the best."""
    return None if keep == -1 else max(keep, 2) + 1


def delete_old(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and the best ones; none if `keep` is -1."""
    _delete(superfluous(checkpoint_folder.list_checkpoints(folder), keep))


def superfluous(checkpoints: list[Checkpoint], keep: int) -> list[Checkpoint]:
    """Return the checkpoints to delete if the newest `keep` and the best ones stay. `checkpoints`
    must be ordered by step; a `keep` of -1 keeps all."""
    best = checkpoint_folder.best_by_validation_data(checkpoints).values()
    return [old for old in _older(checkpoints, keep) if old not in best]


def make_room(folder: Path, keep: int, needed_bytes: int) -> None:
    """Delete old checkpoints if the next one would not fit on the disk: all but the newest `keep` -
    1 (at least one), then as many more as needed, oldest first. The best ones and the newest valid
    one are never deleted."""
    if keep == -1 or disk.has_space(folder, needed_bytes):
        return
    due, kept = _deletable(folder, keep)
    _delete_for_room(folder, due)
    while kept and not disk.has_space(folder, needed_bytes):
        if not disk.has_space(folder, needed_bytes - sum(_bytes_freed_by(c) for c in kept)):
            return
        _delete_for_room(folder, [kept.pop(0)])


def make_room_in_full_disk(folder: Path, keep: int) -> bool:
    """Delete what `make_room` deletes first or, if that is nothing, the oldest other checkpoint
    that may go, which is about as large as the next one. Return whether anything was deleted. For
    disks whose free space no system call tells, because of a quota or other programs."""
    if keep == -1:
        return False
    due, kept = _deletable(folder, keep)
    old = due or [checkpoint for checkpoint in kept if _bytes_freed_by(checkpoint)][:1]
    _delete_for_room(folder, old)
    return bool(old)


def _deletable(folder: Path, keep: int) -> tuple[list[Checkpoint], list[Checkpoint]]:
    """Return the checkpoints that may be deleted to make room, oldest first: those that the next
    save would delete anyway, and the others."""
    checkpoints = checkpoint_folder.list_checkpoints(folder)
    needed = (
        *checkpoint_folder.best_by_validation_data(checkpoints).values(),
        checkpoint_folder.newest_valid(folder),
    )
    older = _older(checkpoints, max(keep - 1, 1))
    free = [checkpoint for checkpoint in checkpoints if checkpoint not in needed]
    return [c for c in free if c in older], [c for c in free if c not in older]


def _delete_for_room(folder: Path, old: Sequence[Checkpoint]) -> None:
    if old:
        names = ", ".join(checkpoint.folder.name for checkpoint in old)
        log.warning("%s: too little space for the next checkpoint; deleting %s", folder, names)
    _delete(old)


def _bytes_freed_by(checkpoint: Checkpoint) -> int:
    return 0 if checkpoint.folder.is_symlink() else disk.folder_bytes(checkpoint.folder)


def _older(checkpoints: list[Checkpoint], keep: int) -> list[Checkpoint]:
    return checkpoints[:-keep] if keep > 0 else []


def _delete(checkpoints: Iterable[Checkpoint]) -> None:
    """Delete checkpoints. For a link, only the link is deleted."""
    for checkpoint in checkpoints:
        with contextlib.suppress(FileNotFoundError):  # already deleted by the user
            disk.discard(checkpoint.folder)


def clean_up(folder: Path) -> None:
    """Delete what a crash left half-written or half-deleted, and update the links."""
    for path in checkpoint_folder.unfinished_checkpoints(folder):
        disk.remove(path)
    checkpoint_folder.update_links(folder)

"""A table of a run's checkpoints, for the `checkpointing.py` command: steps, losses, damage."""

from pathlib import Path
from typing import NamedTuple

from rungs.checkpointing.checkpoint_folder import IMPORTED, checkpoint_folders
from rungs.checkpointing.checksums import CHECKSUMS_FILE, changed_files, read_checksums
from rungs.checkpointing.links import BEST, LATEST, link_target
from rungs.checkpointing.manifest import (
    META_FILE,
    CheckpointError,
    CheckpointMeta,
    read_checkpoint,
)
from rungs.common.disk import folder_bytes
from rungs.common.errors import UserError
from rungs.common.paths import is_file
from rungs.run.folder import RunFolder


class ListedCheckpoint(NamedTuple):
    """One checkpoint folder, valid or not."""

    name: str
    step: int | None
    """The last step taken; None for imported weights or if meta.json cannot be read."""
    train_loss: float | None
    validation_loss: float | None
    pass_at_1: float | None
    """In reinforcement learning."""
    bytes: int
    created: str
    """UTC, ISO 8601; empty if unknown."""
    links: list[str]
    """Which of `best` and `latest` point here."""
    damage: list[str]
    """Files that are missing or changed, or were added and would be read."""
    has_checksums: bool
    problem: str = ""
    """Why it cannot be used, though it is not damaged: "other version" or "unreadable"."""


def list_run(run: RunFolder, *, verify: bool) -> list[ListedCheckpoint]:
    """Return a run's checkpoints in the order they were saved; imported weights come first.

    Args:
        run: the run folder.
        verify: hash every file. Otherwise only missing files and a damaged meta.json are found.
    """
    folder = run.checkpoints
    targets = {name: link_target(folder / name) for name in (BEST, LATEST)}

    def links(path: Path) -> list[str]:
        return [name for name, target in targets.items() if target == path.name]

    imported = [folder / IMPORTED] if (folder / IMPORTED).is_dir() else []
    saved = checkpoint_folders(folder)
    listed = [
        *(_imported(path, verify) for path in imported),
        *(_listed(path, links(path), verify) for path in saved),
    ]
    # a run that is training may have deleted some
    return [checkpoint for checkpoint in listed if (folder / checkpoint.name).is_dir()]


def _listed(folder: Path, links: list[str], verify: bool) -> ListedCheckpoint:
    try:
        checkpoint = read_checkpoint(folder)
    except CheckpointError as error:
        if error.state == "damaged":
            return _without_manifest(folder, links, [META_FILE], has_checksums=False)
        found = _without_manifest(folder, links, [], has_checksums=False)
        return found._replace(problem=error.state)
    meta, damage, problem = checkpoint.meta, list[str](), ""
    try:
        damage = checkpoint.damage() if verify else checkpoint.missing()
    except UserError:
        problem = "unreadable"
    quality = meta.train_loss, meta.validation_loss, _pass_at_1(meta)
    size = folder_bytes(folder)
    return ListedCheckpoint(
        folder.name, meta.global_step, *quality, size, meta.created, links, damage, True, problem
    )


def _pass_at_1(meta: CheckpointMeta) -> float | None:
    try:
        return meta.pass_at_1
    except UserError:  # of another version
        return None


def _imported(folder: Path, verify: bool) -> ListedCheckpoint:
    if not is_file(folder / CHECKSUMS_FILE):  # an earlier version imported it
        return _without_manifest(folder, [], [], has_checksums=False)
    missing = [name for name in read_checksums(folder) if not is_file(folder / name)]
    damage = changed_files(folder) if verify else missing
    return _without_manifest(folder, [], damage, has_checksums=True)


def _without_manifest(
    folder: Path, links: list[str], damage: list[str], *, has_checksums: bool
) -> ListedCheckpoint:
    size = folder_bytes(folder)
    return ListedCheckpoint(
        folder.name, None, None, None, None, size, "", links, damage, has_checksums
    )

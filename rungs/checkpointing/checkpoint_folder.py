"""The checkpoints in a run's `checkpoints/`: what they are called, which are valid, which is best.

A checkpoint is written under a name with a leading dot and renamed once it is complete. A crash
therefore leaves a complete checkpoint or nothing that looks like one.
"""

import datetime
import fnmatch
import logging
from pathlib import Path

from rungs.checkpointing.manifest import Checkpoint, CheckpointError, read_checkpoint
from rungs.common.paths import NO_FILE, cannot_be_read

CHECKPOINT_GLOB = "[0-9]*-step-*"
IMPORTED = "imported"
"""Name of the folder that `pretrained.py import` fills."""
UNFINISHED = "."
"""Prefix of a checkpoint that is being written or deleted, and of a link that is being made."""

_STAMP = "%Y%m%dZ%H%M%S"
log = logging.getLogger("rungs")


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return what is named like a checkpoint, sorted. Unlike `Path.glob`, raises UserError if the
    folder cannot be read: it would look empty, and the run like a new one."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        if error.errno in NO_FILE:
            return []
        raise cannot_be_read(folder, error) from None
    return [folder / name for name in sorted(fnmatch.filter(names, CHECKPOINT_GLOB))]


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints whose `meta.json` can be used, ordered by step."""
    return _read_all(folder)[0]


def unusable_checkpoints(folder: Path) -> dict[Path, CheckpointError]:
    """Return the checkpoint folders whose `meta.json` cannot be used, and why."""
    return _read_all(folder)[1]


def _read_all(folder: Path) -> tuple[list[Checkpoint], dict[Path, CheckpointError]]:
    found, unusable = list[Checkpoint](), dict[Path, CheckpointError]()
    for path in checkpoint_folders(folder):
        try:
            found.append(read_checkpoint(path))
        except CheckpointError as error:
            unusable[path] = error
    return sorted(found, key=lambda c: c.order), unusable


def order_by_name(name: str) -> tuple[int, str]:
    """Return what checkpoints are ordered by, `Checkpoint.order`, from the name of a folder."""
    step = name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1, name


def newest_valid(folder: Path) -> Checkpoint | None:
    """Return the checkpoint with the highest step whose files all match their checksums.

    Logs a warning for each checkpoint that is skipped. Raises UserError if its files cannot be
    read just now.
    """
    for path, error in unusable_checkpoints(folder).items():
        is_damaged = error.state == "damaged"
        log.warning("%s; not used", f"{path}: damaged (meta.json)" if is_damaged else error)
    for candidate in reversed(list_checkpoints(folder)):
        if not (damage := candidate.damage()):
            if extra := candidate.extra_files():
                log.warning("%s: was saved without %s; ignored", candidate.folder, ", ".join(extra))
            return candidate
        log.warning("%s: damaged (%s); not used", candidate.folder, ", ".join(damage))
    return None


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the lowest selection loss, the earliest of equals.

    Only losses on the same validation data as the latest one are compared.

    Args:
        checkpoints: ordered by step.
    """
    rated = [c for c in checkpoints if c.meta.selection_loss is not None]
    return best_by_validation_data(rated)[rated[-1].meta.validation_data] if rated else None


def best_by_validation_data(checkpoints: list[Checkpoint]) -> dict[str | None, Checkpoint]:
    """Return the best checkpoint for each validation data that losses were measured on."""
    ranked = sorted(
        (loss, c.order, c) for c in checkpoints if (loss := c.meta.selection_loss) is not None
    )
    return {c.meta.validation_data: c for *_, c in reversed(ranked)}


def checkpoint_name(folder: Path, step: int) -> str:
    """Return a folder name for a new checkpoint of this step.

    It sorts after all checkpoints of the same step, even if the clock was set back or two are
    saved within a second.
    """
    names = [path.name.removeprefix(UNFINISHED) for path in folder.glob(f"*-step-{step:06d}")]
    stamps = [time_stamp(), *(_stamp_after(name.partition("-")[0]) for name in names)]
    return f"{max(stamps)}-step-{step:06d}"


def _stamp_after(stamp: str) -> str:
    """Return the time stamp one second later; an empty string if `stamp` is not a time stamp."""
    try:
        then = datetime.datetime.strptime(stamp, _STAMP)
    except ValueError:
        return ""
    return f"{then + datetime.timedelta(seconds=1):{_STAMP}}"


def time_stamp() -> str:
    """Return the current UTC time as checkpoint names start with it."""
    return f"{utc_now():{_STAMP}}"


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)

"""The checkpoints in a run's `checkpoints/`: what they are called, which are valid, which is best.

A checkpoint is written under a name with a leading dot and renamed once it is complete. A crash
therefore leaves a complete checkpoint or nothing that looks like one.
"""

import contextlib
import datetime
import logging
from pathlib import Path

from rungs.checkpointing.manifest import Checkpoint, read_checkpoint
from rungs.common.errors import UserError

CHECKPOINT_GLOB = "[0-9]*-step-*"
IMPORTED = "imported"
"""Name of the folder that `pretrained.py import` fills."""
UNFINISHED = "."
"""Prefix of a checkpoint that is being written or deleted, and of a link that is being made."""

_STAMP = "%Y%m%dZ%H%M%S"
log = logging.getLogger("rungs")


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints whose `meta.json` can be read, ordered by step."""
    found = []
    for path in folder.glob(CHECKPOINT_GLOB):
        with contextlib.suppress(UserError):
            found.append(read_checkpoint(path))
    return sorted(found, key=lambda c: c.order)


def unreadable_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders whose `meta.json` is missing or damaged."""
    readable = {c.folder for c in list_checkpoints(folder)}
    return sorted(set(folder.glob(CHECKPOINT_GLOB)) - readable)


def newest_valid(folder: Path) -> Checkpoint | None:
    """Return the checkpoint with the highest step whose files all match their checksums.

    Logs a warning for each damaged checkpoint that is skipped.
    """
    for path in unreadable_checkpoints(folder):
        log.warning("%s: damaged (meta.json); not used", path)
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

"""Checkpoint retention: which checkpoints of a run are deleted, and when.

After each save the newest `keep_checkpoints` (a key of train.json) and the best one stay. If the
validation data was changed between starts, so do the best ones on the earlier data.
`MOST_EXTRA` checkpoints are on disk besides while one is written; forecasts of disk space count it.
"""

import contextlib
import shutil
from pathlib import Path

from rungs.checkpointing import checkpoint_folder, links
from rungs.checkpointing.checkpoint_folder import (
    CHECKPOINT_GLOB,
    UNFINISHED,
    best_by_validation_data,
)

MOST_EXTRA = 2
"""Checkpoints on disk besides the newest `keep_checkpoints`: the best, and one being written."""


def delete_old(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints and the best ones; none if `keep` is -1."""
    checkpoints = checkpoint_folder.list_checkpoints(folder)
    best = best_by_validation_data(checkpoints).values()
    for old in checkpoints[:-keep] if keep > 0 else ():
        if old not in best:
            renamed = old.folder.with_name(UNFINISHED + old.folder.name)
            with contextlib.suppress(FileNotFoundError):  # deleted by the user already
                old.folder.rename(renamed)
                shutil.rmtree(renamed)


def clean_up(folder: Path) -> None:
    """Delete what a crash left half-written or half-deleted, and update the links."""
    for path in folder.glob(UNFINISHED + CHECKPOINT_GLOB):
        shutil.rmtree(path)
    links.update_links(folder)

"""The weights file that the path of a run, a checkpoint or a file stands for."""

import os
from pathlib import Path

from rungs.checkpointing.checkpoint_folder import (
    BEST,
    IMPORTED,
    LATEST,
    broken_link,
    follow_link,
)
from rungs.checkpointing.manifest import refuse_damaged
from rungs.checkpointing.weights_index import WEIGHTS_FILE, file_or_index
from rungs.common.errors import UserError
from rungs.common.paths import is_file, is_folder, is_there
from rungs.common.shown_text import quoted
from rungs.run.folder import RUNS, known_runs


def find_valid_weights(path: Path | str) -> Path:
    """Like `find_weights`, but raise UserError if the weights or their tokenizer are damaged."""
    weights = find_weights(path)
    refuse_damaged(weights)
    return weights


def find_weights(path: Path | str) -> Path:
    """Return the `model.safetensors` that `path` stands for, or the index if it is in shards.
    Raises UserError if there is no such file.

    Args:
        path: a run folder (for its best checkpoint, or imported weights if there is none), a
            checkpoint folder, or a `model.safetensors`, which may be in shards.
    """
    path = RUNS / path if is_folder(RUNS / path) and not is_there(path) else Path(path)
    link = path / "checkpoints" / BEST
    if path.name in (BEST, LATEST) or path.parent.name in (BEST, LATEST):
        link = path if path.name in (BEST, LATEST) else path.parent
        path = follow_link(path)
    for candidate in (
        path,
        path / WEIGHTS_FILE,
        follow_link(path / "checkpoints" / BEST) / WEIGHTS_FILE,
    ):
        if is_file(weights := file_or_index(candidate)):
            return weights
    if os.path.lexists(link):
        raise broken_link(link)
    imported = file_or_index(path / "checkpoints" / IMPORTED / WEIGHTS_FILE)
    if is_file(imported):
        return imported
    if is_folder(path):
        raise UserError(
            f"{path}: no checkpoint there yet; train it first: uv run train.py {quoted(path)}"
        )
    raise UserError(
        f"{path}: no such run, checkpoint or model.safetensors; {known_runs(str(path))}"
    )

"""The weights that a run starts from: those that `start_from` in its `train.json` names."""

import json

from rungs.checkpointing.checkpoint_folder import IMPORTED, find_weights
from rungs.checkpointing.manifest import refuse_damaged
from rungs.checkpointing.merged_weights import MergedWeights
from rungs.checkpointing.weights_file import Weights
from rungs.checkpointing.weights_index import WEIGHTS_FILE, file_or_index
from rungs.common.errors import UserError
from rungs.common.paths import is_file
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig
from rungs.run.folder import RunFolder
from rungs.step.state import shapes_of


def starting_point(run: RunFolder, config: RunConfig) -> Weights | None:
    """The weights that a fresh start begins with; None where they are random.

    Raises:
        UserError: they are not there, or of another architecture than `model.json`; or weights
            were imported and are not asked for.
    """
    name = config.train.start_from
    if name is None:
        _refuse_to_ignore(run)
        return None
    imported = file_or_index(run.imported / WEIGHTS_FILE)
    path = imported if name == IMPORTED else find_weights(name)
    if not is_file(path):
        raise UserError(
            f"{run.path / TRAIN_FILE}: start_from: nothing was imported into this run; make another"
            " folder with uv run pretrained.py import, or name a run or a checkpoint"
        )
    refuse_damaged(path)
    weights = MergedWeights(path)
    lines = [
        f"{run.path / MODEL_FILE}: {key}: {json.dumps(now)}, but in the weights to start from"
        f" ({weights.path}) it is {json.dumps(then)}; put that here"
        for key, (then, now) in run_config.differences(weights.header.model, config.model).items()
        if key not in _may_differ(config.model)
    ]
    if lines:
        raise UserError("\n".join(lines))
    weights.refuse_other_than(shapes_of(weights.header.model))
    return weights


def _refuse_to_ignore(run: RunFolder) -> None:
    if run.imported.exists():
        raise UserError(
            f"{run.path / TRAIN_FILE}: start_from: absent, but {run.imported} holds an imported"
            ' model; add "start_from": "imported", or train from fresh weights in another folder'
            " with --like"
        )


def _may_differ(model: ModelConfig) -> set[str]:
    """Keys of `model.json` that the weights do not depend on."""
    return {"init"} if model.positions == "learned" else {"init", "context_length"}

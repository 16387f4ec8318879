"""The weights that `start_from` names: found and checked against model.json."""

import json
from pathlib import Path

from rungs.checkpointing.checkpoint_folder import IMPORTED
from rungs.checkpointing.find_weights import find_weights
from rungs.checkpointing.load import MergedWeights
from rungs.checkpointing.manifest import refuse_damaged
from rungs.checkpointing.weights_file import Weights
from rungs.checkpointing.weights_index import WEIGHTS_FILE, file_or_index
from rungs.common.errors import UserError
from rungs.common.paths import is_file
from rungs.common.shown_text import quoted
from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, AnyRunConfig
from rungs.run.folder import RunFolder
from rungs.step.state import shapes_of


def find_starting_weights(run: RunFolder, config: AnyRunConfig) -> Weights | None:
    """Return the weights that a fresh start uses, None if they are random. Raises UserError if the
    weights do not exist or have another architecture than `model.json`; or the run holds imported
    weights that `start_from` does not ask for."""
    path = _starting_file(run, config)
    if path is None:
        if run.imported.exists():
            raise UserError(
                f"{run.path / TRAIN_FILE}: start_from: missing, but {run.imported} holds an"
                ' imported model; add "start_from": "imported", or train from random weights in'
                f" another folder: uv run train.py RUN --like {quoted(run.path)}"
            )
        return None
    refuse_damaged(path)
    weights = MergedWeights(path)
    lines = [
        f"{key}: {json.dumps(here)}, but the weights to start from"
        f" ({weights.path}) have {json.dumps(saved)}; change it to that"
        for key, (saved, here) in run_config.differences(weights.header.model, config.model).items()
        if key not in _may_differ(config.model)
    ]
    if lines:
        raise UserError.at(run.path / MODEL_FILE, lines)
    weights.check_tensors(shapes_of(weights.header.model))
    return weights


def starting_dtypes(run: RunFolder, config: AnyRunConfig) -> dict[str, str] | None:
    """Return the dtypes of the parameters that a fresh start reads, by name. There are none if the
    weights are random; None means that they are not here, or not readable."""
    try:
        path = _starting_file(run, config)
        return {} if path is None else MergedWeights(path).dtypes()
    except UserError:
        return None


def _starting_file(run: RunFolder, config: AnyRunConfig) -> Path | None:
    """Return the file that `start_from` names, None if it names none; raises UserError."""
    name = config.train.start_from
    if name is None:
        return None
    imported = file_or_index(run.imported / WEIGHTS_FILE)
    path = imported if name == IMPORTED else find_weights(name)
    if not is_file(path):
        raise UserError(
            f"{run.path / config.train_file}: start_from: nothing was imported into this run; name"
            " a run or a checkpoint, or import into a new folder: uv run pretrained.py import"
            " HUB_ID RUN"
        )
    return path


def _may_differ(model: ModelConfig) -> set[str]:
    """Return the keys of `model.json` that do not change the meaning or shape of the weights."""
    return {"init"} if model.positions == "learned" else {"init", "context_length"}

"""A model and its tokenizer loaded by name: a run, a checkpoint or a weights file."""

import dataclasses
import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from rungs.checkpointing.checkpoint_folder import IMPORTED
from rungs.checkpointing.links import BEST, LATEST, broken_link, follow_link
from rungs.checkpointing.manifest import refuse_damaged
from rungs.checkpointing.merged_weights import MergedWeights
from rungs.checkpointing.restore import place_weights
from rungs.checkpointing.weights_file import Weights
from rungs.checkpointing.weights_index import WEIGHTS_FILE, file_or_index
from rungs.common.errors import UserError
from rungs.common.paths import is_file, is_folder, is_there
from rungs.common.shown_text import quoted
from rungs.data import tokenizer_files
from rungs.data.catalog import dataset_folder, find_datasets_dir
from rungs.data.tokenizer import TOKENIZER_FILE, Tokenizer
from rungs.model.generation import Generator
from rungs.model.gpt import GPT
from rungs.model.weight_formats import UnreadTensor, WeightFormat
from rungs.parallel.sharding import Layout
from rungs.run.folder import RUNS, known_runs
from rungs.step.state import AbstractModel


def load_model(path: Path | str, layout: Layout | None = None) -> GPT:
    """Return a trained model, with LoRA merged.

    Args:
        path: a run folder (its best checkpoint is loaded, or imported weights if there is none),
            a checkpoint folder, or a `model.safetensors`, which may be in shards.
        layout: where its parameters go, in a mode that doesn't split the vocabulary; the first
            device if absent.

    Returns:
        A `GPT`. `model(tokens_BS)` gives float32 logits_BSV; parameters keep
        the dtypes they were saved in.

    Raises:
        UserError: there is nothing to load at `path`, or it is damaged.
    """
    weights = MergedWeights(find_valid_weights(path))
    abstract = AbstractModel(weights.header.model, layout)
    return abstract.fill(place_weights(weights, abstract))


def load_token_generator(
    path: Path | str,
    compute_dtype: DTypeLike = "float32",
    weight_format: WeightFormat = "dtype",
) -> Generator:
    """Return a trained model that continues token ids. Its weights are converted as they are read,
    a layer or a block of rows at a time, so that the model is in memory once, in the form in which
    it is used.

    Args:
        path: as for `load_model`.
        compute_dtype: as for `Generator`, as is `weight_format`.

    Raises:
        UserError: there is nothing to load at `path`, or it is damaged.
        ValueError: the model can't be quantized.
    """
    weights = MergedWeights(find_valid_weights(path))
    abstract = AbstractModel(weights.header.model)
    weights.check_tensors(abstract.shapes)
    dtypes = weights.dtypes()
    unread = {
        name: FileTensor(weights.path, name, shape, jnp.dtype(dtypes[name]))
        for name, shape in abstract.shapes.items()
    }
    model = abstract.fill(unread)
    return Generator(model, jnp.dtype(compute_dtype), weight_format)


@dataclasses.dataclass(frozen=True)
class FileTensor(UnreadTensor):
    """A tensor in a weights file, with LoRA merged."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: np.dtype

    def read(self, *part: slice) -> np.ndarray:
        """Return it, or a part of its first axes; raise UserError if that is not finite."""
        # opened anew: an open file would keep all that was read of it mapped
        return MergedWeights(self.path).array(self.name, part)


def load_tokenizer(path: Path | str, datasets_dir: Path | None = None) -> Tokenizer:
    """Return the tokenizer of a model.

    It is the file next to the weights if there is one, else the tokenizer of the model's dataset,
    else the one on the Hugging Face hub.

    Args:
        path: as for `load_model`.

    Raises:
        UserError: the tokenizer cannot be found, or is damaged.
    """
    weights = find_weights(path)
    opened = Weights(weights)
    if file := opened.tokenizer_file:
        refuse_damaged(weights, only=TOKENIZER_FILE)
        return tokenizer_files.load_tokenizer(file)
    name = opened.header.tokenizer
    if not name:
        raise UserError(
            f"{weights}: was imported without a tokenizer; put its tokenizer.json in that folder"
        )
    folder = dataset_folder(name, find_datasets_dir(datasets_dir))
    return tokenizer_files.load_tokenizer(folder if is_folder(folder) else name)


def find_valid_weights(path: Path | str) -> Path:
    """Like `find_weights`, but raise UserError if the weights or their tokenizer are damaged."""
    weights = find_weights(path)
    refuse_damaged(weights)
    return weights


def find_weights(path: Path | str) -> Path:
    """Return the `model.safetensors` that `path` stands for, or the index if it is in shards.

    Args:
        path: as for `load_model`.

    Raises:
        UserError: there is no such file.
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

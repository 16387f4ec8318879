"""Models of Rungs made into folders that `transformers` loads."""

import contextlib
import dataclasses
import itertools
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rungs.checkpointing.checkpoint_folder import IMPORTED
from rungs.checkpointing.load import find_valid_weights, find_weights
from rungs.checkpointing.merged_weights import MergedWeights
from rungs.checkpointing.weights_file import Weights
from rungs.checkpointing.weights_index import WEIGHTS_FILE, place_tensors, write_index
from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys.hf_config import (
    CONFIG_FILE,
    WITHOUT_EFFECT,
    PublishedConfig,
    read_published_config,
)
from rungs.huggingface.export_tokenizer import write_tokenizer
from rungs.huggingface.families.family import Family
from rungs.huggingface.families.llama import QWEN2
from rungs.huggingface.families.registry import FAMILIES, WITH_VISION
from rungs.huggingface.importing import GENERATION_FILE
from rungs.huggingface.tensors.rules import Rule, parameters, used
from rungs.huggingface.tensors.writer import TensorType, TensorWriter, bits, cast
from rungs.step.state import shapes_of

MOST_SHARD_BYTES = 5_000_000_000
BIASES = ("qkv_bias", "attention_output_bias", "ffn_bias")
"""Keys that a model may be given without changing what it computes, its biases 0."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class Form:
    """The family that a model is written as."""

    family: Family
    model: ModelConfig
    """With the biases that the family has and it had not."""
    added: tuple[str, ...]
    """The keys of those biases."""


def find_form(model: ModelConfig, model_type: str | None = None) -> Form:
    """The first family that can express a model, as it is or with biases of 0.

    Args:
        model_type: of the family to try first.

    Raises:
        UserError: none can; with what the nearest lacks.
    """
    nearest: tuple[dict[str, tuple[Any, Any]], str] | None = None
    for family, added in _candidates(model, WITH_VISION.get(model_type or "", model_type)):
        candidate = model.model_copy(update=dict.fromkeys(added, True))
        misfits = _misfits(family, candidate)
        if not misfits:
            return Form(family, candidate, added)
        if nearest is None or len(misfits) < len(nearest[0]):
            nearest = misfits, family.model_type
    assert nearest is not None
    wanted = {key: now for key, (_, now) in nearest[0].items() if now is not None}
    lacks = ", ".join(f"{key} {strict_json.format_value(now)}" for key, now in wanted.items())
    raise UserError(
        f"no published family can express this model; the nearest, {nearest[1]}, has no {lacks}"
        f" (families: {', '.join(sorted(FAMILIES))})"
    )


def _candidates(model: ModelConfig, first: str | None) -> list[tuple[Family, tuple[str, ...]]]:
    """Families with the biases to add, in the order to try. Qwen 2 comes last unless it is the
    first: transformers splits texts its way, whatever `tokenizer.json` says."""
    absent = [key for key in BIASES if not getattr(model, key)]
    added = [keys for n in range(len(absent) + 1) for keys in itertools.combinations(absent, n)]
    pairs = [(family, keys) for keys in added for family in FAMILIES.values()]
    return sorted(pairs, key=lambda pair: (pair[0].model_type != first, pair[0] is QWEN2))


def _misfits(family: Family, model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """What a family does not express of a model."""
    try:
        written = PublishedConfig(Path(family.model_type), family.write(model))
        return family.misfits(model, written)
    except UserError:  # the values that it would need are none that it can have
        return {key: (None, value) for key, value in model.as_json().items()}


class Export:
    """A model of Rungs as it will be published: nothing but the disk and what its type cannot hold
    are in the way of writing it.

    Args:
        place: a run folder, a checkpoint or a `model.safetensors`.

    Raises:
        UserError: it is not there, damaged, or no family can express it.
    """

    def __init__(self, place: str) -> None:
        self.weights = MergedWeights(find_valid_weights(place))
        header = self.weights.header
        self.origin = header.origin
        try:
            self.form = find_form(header.model, self.origin.model_type if self.origin else None)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        self.weights.check_tensors(shapes_of(header.model))
        self.parameters = parameters(self.form.model)
        self.rules = used(self.form.family.tensors, self.parameters)
        self.companions = imported_folder(self.weights)
        self.types = dict(self._tensor_types())

    def summary(self) -> str:
        """One line on what it is."""
        size = sum(kind.bytes for kind in self.types.values())
        dtypes = ", ".join(sorted({kind.dtype for kind in self.types.values()}))
        zeros = ", ".join(self.form.added)
        added = f"; biases of 0 added, which the family has ({zeros})" if zeros else ""
        name = self.form.family.model_type
        return f"{self.weights.path}: {name}, {size / 1e9:.2f} GB as {dtypes}{added}"

    def write(self, folder: Path) -> list[str]:
        """Fill an empty folder. Returns lines on what it lacks."""
        self._write_weights(folder)
        notes, token_ids = write_tokenizer(folder, self.weights, self.companions)
        if self.form.family is QWEN2 and self.companions is None and not notes:
            notes = [
                "AutoTokenizer splits texts as Qwen 2 does; load the tokenizer with"
                " PreTrainedTokenizerFast.from_pretrained"
            ]
        config = self._write_config(folder, token_ids)
        published = self.companions and self.companions / GENERATION_FILE
        if published and published.is_file():
            shutil.copyfile(published, folder / GENERATION_FILE)
        else:
            generation = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
            _write_json(folder / GENERATION_FILE, {"_from_model_config": True} | generation)
        return notes

    def _dtype(self, name: str) -> str:
        """The type that one of our parameters is published in."""
        if self.origin is None:
            return "float32"
        return self.origin.other_dtypes.get(name, self.origin.dtype)

    def _tensor_types(self) -> Iterator[tuple[str, TensorType]]:
        for rule in self.rules:
            ours = [self.parameters[name] for name in rule.ours]
            kind = TensorType(self._dtype(rule.ours[0]), rule.shape(ours))
            yield from ((name, kind) for _, name in rule.names(ours[0]))

    def _write_weights(self, folder: Path) -> None:
        sizes = {name: kind.bytes for name, kind in self.types.items()}
        files = place_tensors(sizes, MOST_SHARD_BYTES)
        with contextlib.ExitStack() as stack:
            writers: dict[str, TensorWriter] = {}
            for file, names in files.items():
                types = {name: self.types[name] for name in names}
                writer = stack.enter_context(TensorWriter(folder / file, types, {"format": "pt"}))
                writers |= dict.fromkeys(types, writer)
            progress = tqdm(total=len(self.types), unit=" tensors", disable=None)
            for rule in self.rules:
                for name, tensor in self._tensors(rule):
                    writers[name].write(name, tensor)
                    progress.update()
            progress.close()
        write_index(folder, files, sizes)

    def _tensors(self, rule: Rule) -> Iterator[tuple[str, np.ndarray]]:
        """Every tensor of a rule, as its bits."""
        ours = [self.parameters[name] for name in rule.ours]
        weights = MergedWeights(self.weights.path)  # anew, so that what was read leaves memory
        arrays = [array_of(weights, name, self.parameters[name].shape) for name in rule.ours]
        dtype = self._dtype(rule.ours[0])
        for index, name in rule.names(ours[0]):
            items = [cast(array[index], dtype) for array in arrays]
            if dtype == "float16" and not all(np.isfinite(item).all() for item in items):
                raise UserError(
                    f"{self.weights.path}: {rule.ours[0]}: has values that float16, in which it"
                    f" was published, cannot hold"
                )
            yield name, rule.join([bits(item) for item in items], ours)

    def _write_config(self, folder: Path, token_ids: dict[str, int | None]) -> dict[str, Any]:
        """Write `config.json`: the one that was imported, where it still says what the model is."""
        form, origin = self.form, self.origin
        keys: dict[str, Any] = dict(token_ids)
        if self.companions is not None:
            published = read_published_config(self.companions)
            published.ignore(tuple(published.values))
            same_kind = published.model_type == form.family.model_type
            if same_kind and not form.family.misfits(form.model, published):
                shutil.copyfile(self.companions / CONFIG_FILE, folder / CONFIG_FILE)
                return published.values
            kept = published.values.items()
            keys |= {key: value for key, value in kept if key in WITHOUT_EFFECT}
        keys |= form.family.write(form.model) | {
            "torch_dtype": origin.dtype if origin else "float32"
        }
        _write_json(folder / CONFIG_FILE, keys)
        return keys


def array_of(weights: Weights, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One of the parameters to export; zeros where it is a bias that was added."""
    if name in weights.names():
        return weights.array(name)
    assert name.endswith(".bias")
    return np.zeros(shape, np.float32)


def imported_folder(weights: Weights) -> Path | None:
    """Where the files lie that were imported with the weights that these began as: with them, in
    their run's `checkpoints/imported/`, or with what their run started from."""
    header, seen = weights.header, weights.path.parent
    if header.origin is None:
        return None
    candidates = [seen, seen.parent / IMPORTED]
    start = header.train.start_from if header.train else None
    if start not in (None, IMPORTED):
        with contextlib.suppress(UserError):
            earlier = Weights(find_weights(str(start)))
            candidates.append(imported_folder(earlier) or earlier.path.parent)
    for folder in candidates:
        if (folder / CONFIG_FILE).is_file() and (folder / WEIGHTS_FILE).is_file():
            return folder
    return None


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")

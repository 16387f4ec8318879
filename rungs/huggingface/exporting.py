"""Write a model as a folder that transformers loads."""

import contextlib
import dataclasses
import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from rungs.checkpointing.checkpoint_folder import IMPORTED, find_valid_weights
from rungs.checkpointing.load import MergedWeights
from rungs.checkpointing.published import (
    CONFIG_FILE,
    GENERATION_FILE,
    published_files,
    published_folder,
)
from rungs.checkpointing.weights_file import (
    TensorSpec,
    TensorWriter,
    Weights,
    bits,
    cast,
    place_tensors,
    write_index,
)
from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys.hf_config import HFConfig, has_no_effect, read_hf_config
from rungs.huggingface.families.family import Family
from rungs.huggingface.families.llama import QWEN2
from rungs.huggingface.families.registry import FAMILIES, VISION_MODELS
from rungs.huggingface.hf_tokenizer import write_ends, write_json, write_tokenizer
from rungs.huggingface.tensors.rules import Rule, model_parameters, rules_for
from rungs.step.state import shapes_of

MAX_SHARD_BYTES = 5_000_000_000
BIASES = ("qkv_bias", "attention_output_bias", "ffn_bias")
"""Keys that can be turned on without changing what a model computes, if the biases are 0."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class FamilyChoice:
    """The family that a model is written as."""

    family: Family
    model: ModelConfig
    """The model, with the biases that the family has and it lacks."""
    added_biases: tuple[str, ...]
    """The keys of those biases."""


def choose_family(model: ModelConfig, model_type: str | None = None) -> FamilyChoice:
    """Return the first family that can express a model, as it is or with biases of 0.

    Args:
        model_type: the family to try first.

    Raises:
        UserError: none can. Says what the closest family lacks.
    """
    closest: tuple[dict[str, tuple[Any, Any]], str] | None = None
    for family, biases in _candidates(model, VISION_MODELS.get(model_type or "", model_type)):
        candidate = model.model_copy(update=dict.fromkeys(biases, True))
        differences = _differences(family, candidate)
        if not differences:
            return FamilyChoice(family, candidate, biases)
        if closest is None or len(differences) < len(closest[0]):
            closest = differences, family.model_type
    assert closest is not None
    lacking = {key: value for key, (_, value) in closest[0].items() if value is not None}
    lacks = ", ".join(f"{key} {strict_json.format_value(value)}" for key, value in lacking.items())
    raise UserError(
        f"no supported family can express this model; the closest, {closest[1]}, has no {lacks}"
        f" (families: {', '.join(sorted(FAMILIES))})"
    )


def _candidates(model: ModelConfig, first: str | None) -> list[tuple[Family, tuple[str, ...]]]:
    """Return the families to try in order, each with biases to add. Qwen 2 comes last unless it is
    `first`, because transformers splits texts its way, whatever `tokenizer.json` says."""
    absent = [key for key in BIASES if not getattr(model, key)]
    subsets = [keys for n in range(len(absent) + 1) for keys in itertools.combinations(absent, n)]
    pairs = [(family, keys) for keys in subsets for family in FAMILIES.values()]
    return sorted(pairs, key=lambda pair: (pair[0].model_type != first, pair[0] is QWEN2))


def _differences(family: Family, model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the keys of a model that a family cannot express."""
    try:
        written = HFConfig(Path(family.model_type), family.to_hf_config(model))
        return family.differences(model, written)
    except UserError:  # the config that it would need is invalid for the family
        return {key: (None, value) for key, value in model.as_json().items()}


class Export:
    """A model that was checked and can be written. Writing fails only if the disk does, or if a
    value overflows the dtype to write.

    Args:
        place: a run folder, a checkpoint or a `model.safetensors`.

    Raises:
        UserError: it does not exist, is damaged, or no family can express it.
    """

    def __init__(self, place: str) -> None:
        self.weights = MergedWeights(find_valid_weights(place))
        header = self.weights.header
        self.origin = header.origin
        model_type = self.origin.model_type if self.origin else None
        try:
            self.choice = choose_family(header.model, model_type)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        self.weights.check_tensors(shapes_of(header.model))
        self.parameters = model_parameters(self.choice.model)
        self.rules = rules_for(self.parameters, self.choice.family.tensors)
        self.published = published_folder(self.weights)
        if self.published:
            published_files(self.published)  # none is a link out of it
        self.specs = dict(self._tensor_specs())

    def summary(self) -> str:
        """Describe the export in one line."""
        size = sum(spec.bytes for spec in self.specs.values())
        dtypes = ", ".join(sorted({spec.dtype for spec in self.specs.values()}))
        biases = ", ".join(self.choice.added_biases)
        added = f"; adds biases of 0 that the family has ({biases})" if biases else ""
        model_type = self.choice.family.model_type
        return f"{self.weights.path}: {model_type}, {size / 1e9:.2f} GB as {dtypes}{added}"

    def write(self, folder: Path) -> list[str]:
        """Fill an empty folder. Returns notes on what is missing."""
        self._write_weights(folder)
        notes, token_ids = write_tokenizer(folder, self.weights, self.published)
        if self.choice.family is QWEN2 and self.published is None and not notes:
            notes = [
                "AutoTokenizer splits texts as Qwen 2 does; load the tokenizer with"
                " PreTrainedTokenizerFast.from_pretrained"
            ]
        config = self._write_config(folder, token_ids)
        generation_file = self.published and self.published / GENERATION_FILE
        if generation_file and generation_file.is_file():
            shutil.copyfile(generation_file, folder / GENERATION_FILE)
        else:
            generation = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
            write_json(
                folder / GENERATION_FILE, {"_from_model_config": True} | generation, sort_keys=True
            )
        write_ends(folder, self.weights)
        return notes + self._missing_files()

    def _missing_files(self) -> list[str]:
        """Return a note if the files that the model was published with are gone."""
        if self.origin is None or self.published is not None:
            return []
        return [
            "written without the chat template, generation config and other files that the model"
            f" was published with: {IMPORTED}/ is gone; for those, import {self.origin.source}"
            f" again, copy checkpoints/{IMPORTED} to {self.weights.path.parent.parent / IMPORTED},"
            " and repeat this"
        ]

    def _dtype(self, name: str) -> str:
        """Return the dtype to write a parameter in."""
        if self.origin is None:
            return "float32"
        return self.origin.other_dtypes.get(name, self.origin.dtype)

    def _tensor_specs(self) -> Iterator[tuple[str, TensorSpec]]:
        for rule in self.rules:
            parameters = [self.parameters[name] for name in rule.parameters]
            spec = TensorSpec(self._dtype(rule.parameters[0]), rule.shape(parameters))
            yield from ((name, spec) for _, name in rule.hf_names(parameters[0]))

    def _write_weights(self, folder: Path) -> None:
        sizes = {name: spec.bytes for name, spec in self.specs.items()}
        files = place_tensors(sizes, MAX_SHARD_BYTES)
        with contextlib.ExitStack() as stack:
            writers: dict[str, TensorWriter] = {}
            for file, names in files.items():
                specs = {name: self.specs[name] for name in names}
                writer = stack.enter_context(TensorWriter(folder / file, specs, {"format": "pt"}))
                writers |= dict.fromkeys(specs, writer)
            progress = tqdm(total=len(self.specs), unit=" tensors", disable=None)
            for rule in self.rules:
                for name, tensor in self._tensors(rule):
                    writers[name].write(name, tensor)
                    progress.update()
            progress.close()
        write_index(folder, files, sizes)

    def _tensors(self, rule: Rule) -> Iterator[tuple[str, np.ndarray]]:
        """Yield name and bits of every tensor of a rule."""
        parameters = [self.parameters[name] for name in rule.parameters]
        weights = MergedWeights(self.weights.path)  # a new one, so that memory is freed after it
        arrays = [load_or_zeros(weights, n, self.parameters[n].shape) for n in rule.parameters]
        dtype = self._dtype(rule.parameters[0])
        for index, name in rule.hf_names(parameters[0]):
            items = [cast(array[index], dtype) for array in arrays]
            if dtype == "float16" and not all(np.isfinite(item).all() for item in items):
                raise UserError(
                    f"{self.weights.path}: {rule.parameters[0]}: has values that overflow float16,"
                    " the dtype the model was published in"
                )
            yield name, rule.join([bits(item) for item in items], parameters)

    def _write_config(self, folder: Path, token_ids: dict[str, int | None]) -> dict[str, Any]:
        """Write `config.json`: the imported one if it still describes the model."""
        choice, origin = self.choice, self.origin
        keys: dict[str, Any] = dict(token_ids)
        if self.published is not None:
            published = read_hf_config(self.published)
            published.ignore(tuple(published.values))
            same_type = published.model_type == choice.family.model_type
            if same_type and not choice.family.differences(choice.model, published):
                shutil.copyfile(self.published / CONFIG_FILE, folder / CONFIG_FILE)
                return published.values
            items = published.values.items()
            keys |= {key: value for key, value in items if has_no_effect(key)}
        keys |= choice.family.to_hf_config(choice.model) | {
            "torch_dtype": origin.dtype if origin else "float32"
        }
        write_json(folder / CONFIG_FILE, keys, sort_keys=True)
        return keys


def load_or_zeros(weights: Weights, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return a parameter to export, or zeros for an added bias."""
    if name in weights.names():
        return weights.array(name)
    assert name.endswith(".bias")
    return np.zeros(shape, np.float32)

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

from rungs.checkpointing import checkpoint_folder, published, weights_file
from rungs.checkpointing.checkpoint_folder import IMPORTED
from rungs.checkpointing.load import MergedWeights
from rungs.checkpointing.weights_file import TensorSpec, TensorWriter, bits, cast
from rungs.common import strict_json
from rungs.common.errors import UserError
from rungs.config.model_config import ModelConfig
from rungs.huggingface.config_keys.keys import HFConfig, has_no_effect, read_hf_config
from rungs.huggingface.families.family import Family
from rungs.huggingface.families.llama import QWEN2
from rungs.huggingface.families.registry import FAMILIES, VISION_MODELS
from rungs.huggingface.hf_tokenizer import write_ends, write_json, write_tokenizer
from rungs.huggingface.tensors.rules import TensorGroup, tensor_groups
from rungs.step.state import shapes_of

MAX_SHARD_BYTES = 5_000_000_000
BIASES = ("qkv_bias", "attention_output_bias", "ffn_bias")
"""Bias keys that can be turned on, with biases of 0, without changing the model's output."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class FamilyChoice:
    """The family in which a model is exported."""

    family: Family
    model: ModelConfig
    """The model, plus the biases that the family requires."""
    added_biases: tuple[str, ...]
    """Keys of the added biases."""


def choose_family(model: ModelConfig, model_type: str | None = None) -> FamilyChoice:
    """Return the first family, `model_type` before the others, that can express a model, if need be
    with biases of 0. Raises UserError, with what the closest family lacks, if none can."""
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
    """Return the families to try, in order, each with biases to add. Qwen 2 comes last unless it is
    `first`, as transformers splits its texts in its own way regardless of `tokenizer.json`."""
    absent = [key for key in BIASES if not getattr(model, key)]
    subsets = [keys for n in range(len(absent) + 1) for keys in itertools.combinations(absent, n)]
    pairs = [(family, keys) for keys in subsets for family in FAMILIES.values()]
    return sorted(pairs, key=lambda pair: (pair[0].model_type != first, pair[0] is QWEN2))


def _differences(family: Family, model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    """Return the model's keys that a family cannot express."""
    try:
        written = HFConfig(Path(family.model_type), family.to_hf_config(model))
        return family.differences(model, written)
    except UserError:  # the resulting config would be invalid for the family
        return {key: (None, value) for key, value in model.as_json().items()}


class Export:
    """A checked model (run folder, checkpoint or `model.safetensors`) to export. Writing only fails
    if the disk does, or a value overflows the target dtype. Raises UserError if it does not exist,
    is damaged, or no family can express it."""

    def __init__(self, place: str) -> None:
        self.weights = MergedWeights(checkpoint_folder.find_valid_weights(place))
        header = self.weights.header
        self.origin = header.origin
        model_type = self.origin.model_type if self.origin else None
        try:
            self.choice = choose_family(header.model, model_type)
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        self.weights.check_tensors(shapes_of(header.model))
        self._groups = tensor_groups(self.choice.model, self.choice.family.tensors)
        self.published = published.published_folder(self.weights)
        if self.published:
            published.published_files(self.published)  # none is a link out of it
        self.specs = {
            name: TensorSpec(self._dtype(group), group.shape)
            for group in self._groups
            for name in group.names
        }
        """dtype and shape of each tensor, by Hugging Face name."""

    def summary(self) -> str:
        """Describe the export in one line."""
        size = sum(spec.bytes for spec in self.specs.values())
        dtypes = ", ".join(sorted({spec.dtype for spec in self.specs.values()}))
        biases = ", ".join(self.choice.added_biases)
        added = f"; adds biases of 0 that the family has ({biases})" if biases else ""
        model_type = self.choice.family.model_type
        return f"{self.weights.path}: {model_type}, {size / 1e9:.2f} GB as {dtypes}{added}"

    def write(self, folder: Path) -> list[str]:
        """Fill an empty folder. Return notes on missing parts."""
        self._write_weights(folder)
        notes, token_ids = write_tokenizer(folder, self.weights, self.published)
        if self.choice.family is QWEN2 and self.published is None and not notes:
            notes = [
                "AutoTokenizer splits texts as Qwen 2 does; load the tokenizer with"
                " PreTrainedTokenizerFast.from_pretrained"
            ]
        config = self._write_config(folder, token_ids)
        generation_file = self.published and self.published / published.GENERATION_FILE
        if generation_file and generation_file.is_file():
            shutil.copyfile(generation_file, folder / published.GENERATION_FILE)
        else:
            generation = {key: config[key] for key in TOKEN_IDS if config.get(key) is not None}
            keys = {"_from_model_config": True} | generation
            write_json(folder / published.GENERATION_FILE, keys, sort_keys=True)
        write_ends(folder, self.weights)
        if self.origin is not None and self.published is None:
            notes.append(
                "written without the chat template, generation config and other files that the"
                f" model was published with: {IMPORTED}/ is gone; for those, import"
                f" {self.origin.source} again, copy checkpoints/{IMPORTED} to"
                f" {self.weights.path.parent.parent / IMPORTED}, and repeat this"
            )
        return notes

    def _dtype(self, group: TensorGroup) -> str:
        """Return the dtype in which some tensors are written."""
        if self.origin is None:
            return "float32"
        return self.origin.other_dtypes.get(next(iter(group.parameters)), self.origin.dtype)

    def _write_weights(self, folder: Path) -> None:
        sizes = {name: spec.bytes for name, spec in self.specs.items()}
        files = weights_file.place_tensors(sizes, MAX_SHARD_BYTES)
        with contextlib.ExitStack() as stack:
            writers: dict[str, TensorWriter] = {}
            for file, names in files.items():
                specs = {name: self.specs[name] for name in names}
                writer = stack.enter_context(TensorWriter(folder / file, specs, {"format": "pt"}))
                writers |= dict.fromkeys(specs, writer)
            progress = tqdm(total=len(self.specs), unit=" tensors", disable=None)
            for group in self._groups:
                for name, tensor in self._tensors(group):
                    writers[name].write(name, tensor)
                    progress.update()
            progress.close()
        weights_file.write_index(folder, files, sizes)

    def _tensors(self, group: TensorGroup) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name and bits of every tensor of a group."""
        weights = MergedWeights(self.weights.path)  # a new one, to free its memory afterwards
        arrays = {
            # a bias that is missing was added
            name: weights.array(name) if name in weights.names() else np.zeros(each.shape, "f4")
            for name, each in group.parameters.items()
        }
        dtype = self._dtype(group)
        for name, index in group.names.items():
            items = [cast(array[index], dtype) for array in arrays.values()]
            if dtype == "float16" and not all(np.isfinite(item).all() for item in items):
                raise UserError(
                    f"{self.weights.path}: {next(iter(arrays))}: has values that overflow float16,"
                    " the dtype the model was published in"
                )
            yield name, group.join([bits(item) for item in items])

    def _write_config(self, folder: Path, token_ids: dict[str, int | None]) -> dict[str, Any]:
        """Write `config.json`: the imported one if it still describes the model."""
        choice, origin = self.choice, self.origin
        keys: dict[str, Any] = dict(token_ids)
        if self.published is not None:
            before = read_hf_config(self.published)
            before.ignore(tuple(before.values))
            same_type = before.model_type == choice.family.model_type
            if same_type and not choice.family.differences(choice.model, before):
                shutil.copyfile(
                    self.published / published.CONFIG_FILE, folder / published.CONFIG_FILE
                )
                return before.values
            keys |= {key: value for key, value in before.values.items() if has_no_effect(key)}
        keys |= choice.family.to_hf_config(choice.model) | {
            "torch_dtype": origin.dtype if origin else "float32"
        }
        write_json(folder / published.CONFIG_FILE, keys, sort_keys=True)
        return keys

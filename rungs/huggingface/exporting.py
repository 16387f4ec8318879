"""Write a model as a folder that transformers loads, or a run's LoRA as an adapter for peft."""

import contextlib
import copy
import dataclasses
import itertools
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save
from tqdm import tqdm

from rungs.checkpointing import checkpoint_folder, load, published, weights_file
from rungs.checkpointing.weights_file import TensorSpec, TensorWriter, Weights, bits, cast
from rungs.common import strict_json
from rungs.common.errors import UserError, errors_at
from rungs.common.shown_text import format_bytes
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import LoraConfig
from rungs.huggingface import hf_tokenizer
from rungs.huggingface.config_keys import HFConfig, has_no_effect, read_hf_config
from rungs.huggingface.families import FAMILIES, VISION_MODELS
from rungs.huggingface.families.family import Family
from rungs.huggingface.families.llama import QWEN2
from rungs.huggingface.tensors import TensorGroup, tensor_groups
from rungs.model.lora import DOWN, UP
from rungs.step.state import shapes_of

MAX_SHARD_BYTES = 5_000_000_000
BIASES = ("qkv_bias", "attention_output_bias", "ffn_bias")
"""Bias keys that can be turned on, with biases of 0, without changing the model's output."""
QUANTIZATION = "quantization_config"
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_WRAPPER = "base_model.model."
"""Prefix of module names in peft."""
_KERNEL, _WEIGHT = "kernel", ".weight"


@dataclasses.dataclass(frozen=True)
class FamilyChoice:
    """The family in which a model is exported."""

    family: Family
    model: ModelConfig
    """The model, plus the biases that the family requires."""
    added_biases: tuple[str, ...]
    """Keys of the added biases."""


def choose_family(
    model: ModelConfig,
    model_type: str | None = None,
    families: Iterable[Family] = FAMILIES.values(),
) -> FamilyChoice:
    """Return the first of some families, `model_type` before the others, that can express a model,
    if need be with biases of 0. Raises UserError, with what the closest family lacks, if none
    can."""
    found: list[tuple[dict[str, tuple[Any, Any]], str]] = []
    first = VISION_MODELS.get(model_type or "", model_type)
    absent = [key for key in BIASES if not getattr(model, key)]
    subsets = [keys for n in range(len(absent) + 1) for keys in itertools.combinations(absent, n)]
    candidates = [(family, biases) for biases in subsets for family in families]
    # Qwen 2 last, as transformers splits its texts in its own way regardless of `tokenizer.json`
    candidates.sort(key=lambda pair: (pair[0].model_type != first, pair[0] is QWEN2))
    for family, biases in candidates:
        candidate = model.model_copy(update=dict.fromkeys(biases, True))
        differences = _differences(family, candidate)
        if not differences:
            return FamilyChoice(family, candidate, biases)
        found.append((differences, family.model_type))
    differences, name = min(found, key=lambda one: len(one[0]))
    lacks = {key: ours for key, (_, ours) in differences.items() if ours is not None}
    has = {key: theirs for key, (theirs, _) in differences.items()}
    named = [f"{key} {strict_json.format_value(value)}" for key, value in (lacks or has).items()]
    raise UserError(
        f"no supported family can express this model; the closest, {name},"
        f" {'has no' if lacks else 'always has'} {', '.join(named)}"
        f" (families: {', '.join(sorted({family.model_type for family in families}))})"
    )


def _differences(family: Family, model: ModelConfig) -> dict[str, tuple[Any, Any]]:
    try:
        written = HFConfig(Path(family.model_type), family.to_hf_config(model))
        return family.differences(model, written)
    except UserError:  # the resulting config would be invalid for the family
        return {key: (None, value) for key, value in model.as_json().items()}


class Export:
    """A checked model (run folder, checkpoint or `model.safetensors`) to export. Writing only fails
    if the disk does, or a value overflows the target dtype. Raises UserError if it does not exist,
    is damaged, or no family can express it."""

    def __init__(self, place: str, families: Iterable[Family] = FAMILIES.values()) -> None:
        self.weights = load.MergedWeights(checkpoint_folder.find_valid_weights(place))
        header = self.weights.header
        self.origin = header.origin
        model_type = self.origin.model_type if self.origin else None
        with errors_at(f"{place}: "):
            self.choice = choose_family(header.model, model_type, families)
        self.weights.check_tensors(shapes_of(header.model))
        self.groups = tensor_groups(self.choice.model, self.choice.family.tensors)
        self.published = published.published_folder(self.weights)
        if self.published:
            published.published_files(self.published)  # none is a link out of it
        self.specs: dict[str, TensorSpec] = {}
        """dtype and shape of each tensor, by Hugging Face name."""
        for group in self.groups:
            dtype = "float32"
            if self.origin is not None:
                parameter = next(iter(group.parameters))
                dtype = self.origin.other_dtypes.get(parameter, self.origin.dtype)
            self.specs |= dict.fromkeys(group.names, TensorSpec(dtype, group.shape))

    def summary(self) -> str:
        """Describe the export in one line."""
        size = sum(spec.bytes for spec in self.specs.values())
        dtypes = ", ".join(sorted({spec.dtype for spec in self.specs.values()}))
        biases = ", ".join(self.choice.added_biases)
        added = f"; adds biases of 0 that the family has ({biases})" if biases else ""
        model_type = self.choice.family.model_type
        return f"{self.weights.path}: {model_type}, {format_bytes(size)} as {dtypes}{added}"

    def in_family(self, families: Iterable[Family]) -> "Export":
        """Return the export in one of other families, in float32. Raises UserError if none can
        express the model."""
        other = copy.copy(self)
        other.choice = choose_family(self.weights.header.model, None, families)
        other.groups = tensor_groups(other.choice.model, other.choice.family.tensors)
        other.specs = {}
        for group in other.groups:
            other.specs |= dict.fromkeys(group.names, TensorSpec("float32", group.shape))
        return other

    def write(self, folder: Path) -> list[str]:
        """Fill an empty folder. Return notes on missing parts."""
        self._write_weights(folder)
        return self.write_files(folder)

    def write_files(self, folder: Path) -> list[str]:
        """Write everything but the weights into a folder. Return notes on missing parts."""
        notes, token_ids = hf_tokenizer.write_tokenizer(folder, self.weights, self.published)
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
            hf_tokenizer.write_json(folder / published.GENERATION_FILE, keys, sort_keys=True)
        hf_tokenizer.write_ends(folder, self.weights)
        if self.origin is not None and self.published is None:
            notes.append(
                "written without the chat template, generation config and other files that the"
                f" model was published with: import {self.origin.source} again, and copy its"
                f" checkpoints/{checkpoint_folder.IMPORTED} to {self.weights.path.parent.parent}"
            )
        return notes

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
            for group in self.groups:
                for name, tensor in self.tensors(group):
                    writers[name].write(name, tensor)
                    progress.update()
            progress.close()
        weights_file.write_index(folder, files, sizes)

    def tensors(self, group: TensorGroup) -> Iterator[tuple[str, np.ndarray]]:
        """Yield the name and the content of a group's tensors, as unsigned integers."""
        weights = load.MergedWeights(self.weights.path)  # a new one, to free its memory afterwards
        arrays = [
            # a bias that is missing was added
            weights.array(name) if name in weights.names() else np.zeros(each.shape, "f4")
            for name, each in group.parameters.items()
        ]
        for name, index in group.names.items():
            dtype = self.specs[name].dtype
            items = [cast(array[index], dtype) for array in arrays]
            if dtype == "float16" and not all(np.isfinite(item).all() for item in items):
                raise UserError(
                    f"{self.weights.path}: {next(iter(group.parameters))}: has values that overflow"
                    " float16, the dtype the model was published in"
                )
            yield name, group.join([bits(item) for item in items])

    def _write_config(self, folder: Path, token_ids: dict[str, int | None]) -> dict[str, Any]:
        """Write `config.json`: the imported one if it still describes the model."""
        choice, origin = self.choice, self.origin
        keys: dict[str, Any] = dict(token_ids)
        if self.published is not None:
            before = read_hf_config(self.published)
            before.ignore(before.values)
            same_type = before.model_type == choice.family.model_type
            is_whole = QUANTIZATION not in before.values  # as exported weights are
            if same_type and is_whole and not choice.family.differences(choice.model, before):
                shutil.copyfile(
                    self.published / published.CONFIG_FILE, folder / published.CONFIG_FILE
                )
                return before.values
            keys |= {key: value for key, value in before.values.items() if has_no_effect(key)}
        keys |= choice.family.to_hf_config(choice.model) | {
            "torch_dtype": origin.dtype if origin else "float32"
        }
        hf_tokenizer.write_json(folder / published.CONFIG_FILE, keys, sort_keys=True)
        return keys


class AdaptedModule(NamedTuple):
    """A Hugging Face module with its adapter, which adds alpha ÷ rank · B·A to its weight.
    If it holds several of our projections side by side, as GPT-2's `c_attn` does, A has the rows of
    all of them, and B one block of each
    (https://huggingface.co/docs/peft/developer_guides/checkpoint)."""

    name: str
    rank: int
    alpha: float
    a_RI: np.ndarray
    """R rank, I inputs."""
    b_OR: np.ndarray
    """O outputs."""

    @property
    def target(self) -> str:
        """Suffix of the name, the same in all layers."""
        return ".".join(self.name.split(".")[-2:])


class Adapter:
    """The adapter of a run folder, a checkpoint or a `model.safetensors`. Weights are read when it
    is written. Raises UserError if there is no checkpoint, it is damaged or has no LoRA, or no
    family can express the model."""

    def __init__(self, place: str) -> None:
        self._weights = Weights(checkpoint_folder.find_valid_weights(place))
        header = self._weights.header
        lora = header.train.lora if header.train else None
        if header.train is None or lora is None:
            raise UserError(f"{place}: was not trained with lora, so it has no adapter to export")
        self._lora: LoraConfig = lora
        origin, names = header.origin, self._weights.names()
        choice = choose_family(header.model, origin.model_type if origin else None)
        self._groups = [
            group
            for group in tensor_groups(choice.model, choice.family.tensors)
            if any(_low_rank(name, DOWN) in names for name in group.parameters)
        ]
        self.base, self.base_is_known = str(header.train.start_from), False
        """The base model: a hub id, else what the run started from."""
        if self.base == checkpoint_folder.IMPORTED and origin is not None:
            self.base, self.base_is_known = origin.source, origin.revision is not None

    def write(self, folder: Path) -> None:
        """Fill an empty folder."""
        modules = list(self._modules())
        tensors = {}
        for module in modules:
            tensors[f"{_WRAPPER}{module.name}.lora_A.weight"] = module.a_RI
            tensors[f"{_WRAPPER}{module.name}.lora_B.weight"] = module.b_OR
        (folder / ADAPTER_WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
        wider = {module.target: module for module in modules if module.rank != self._lora.rank}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self._lora.rank,
            "lora_alpha": self._lora.alpha,
            "rank_pattern": {target: module.rank for target, module in wider.items()},
            "alpha_pattern": {target: module.alpha for target, module in wider.items()},
            "target_modules": sorted({module.target for module in modules}),
            "fan_in_fan_out": not self._groups[0].is_transposed,
            "lora_dropout": 0.0,
            "bias": "none",
            "inference_mode": True,
        }
        hf_tokenizer.write_json(folder / ADAPTER_CONFIG_FILE, config)

    def _modules(self) -> Iterator[AdaptedModule]:
        """Yield each module, of one layer."""
        rank, names = self._lora.rank, self._weights.names()
        for group in self._groups:
            # both matrices of each projection, (L, …), nothing for one without an adapter
            adapted = [
                [self._weights.array(_low_rank(name, end)).astype("f4") for end in (DOWN, UP)]
                if _low_rank(name, DOWN) in names
                else []
                for name in group.parameters
            ]
            outputs = [matrix[-1] for matrix in group.matrices]
            count = sum(map(bool, adapted))
            for name, index in group.names.items():
                b_OR = np.zeros((sum(outputs), count * rank), np.float32)
                rows, column, first = [], 0, 0
                for pair, size in zip(adapted, outputs, strict=True):
                    if pair:
                        down, up = (matrix[index] for matrix in pair)
                        rows.append(down.reshape(-1, rank).T)
                        b_OR[first : first + size, column : column + rank] = up.reshape(rank, -1).T
                        column += rank
                    first += size
                places = np.split(np.arange(len(b_OR)), np.cumsum(outputs)[:-1])
                b_OR = b_OR[group.side_by_side(places)]
                a_RI = np.ascontiguousarray(np.concatenate(rows))
                alpha = count * self._lora.alpha
                yield AdaptedModule(name.removesuffix(_WEIGHT), column, alpha, a_RI, b_OR)


def _low_rank(kernel: str, end: str) -> str:
    return kernel.removesuffix(_KERNEL) + end

"""Export a run's LoRA as an adapter for Hugging Face's `peft`
(https://huggingface.co/docs/peft/developer_guides/checkpoint).

An adapter adds alpha ÷ rank · B·A to a module's weight: A is (rank, inputs), B (outputs, rank). If
a module holds several of our projections side by side, as GPT-2's `c_attn` does, its A has the rows
of all of them, and its B one block of each."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.weights_file import Weights
from rungs.common.errors import UserError
from rungs.config.optimization_config import LoraConfig
from rungs.huggingface import exporting, hf_tokenizer
from rungs.huggingface.tensors.rules import TensorGroup, tensor_groups
from rungs.model.lora import DOWN, UP

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_WRAPPER = "base_model.model."
"""Prefix of module names in peft."""
_KERNEL, _WEIGHT = "kernel", ".weight"


class AdaptedModule(NamedTuple):
    """A module of a Hugging Face model with its adapter."""

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
        choice = exporting.choose_family(header.model, origin.model_type if origin else None)
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
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        hf_tokenizer.write_json(folder / CONFIG_FILE, self._config(modules))

    def _config(self, modules: list[AdaptedModule]) -> dict[str, Any]:
        wider = {module.target: module for module in modules if module.rank != self._lora.rank}
        return {
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

    def _modules(self) -> Iterator[AdaptedModule]:
        for group in self._groups:
            adapted = [self._low_rank_arrays(name) for name in group.parameters]
            for name, index in group.names.items():
                yield self._module(name.removesuffix(_WEIGHT), index, group, adapted)

    def _low_rank_arrays(self, kernel: str) -> tuple[np.ndarray, np.ndarray] | None:
        """Return both matrices of a projection, (L, …), or None if it has no adapter."""
        names = _low_rank(kernel, DOWN), _low_rank(kernel, UP)
        if names[0] not in self._weights.names():
            return None
        down, up = (self._weights.array(name).astype(np.float32) for name in names)
        return down, up

    def _module(
        self,
        name: str,
        index: tuple[int, ...],
        group: TensorGroup,
        adapted: list[tuple[np.ndarray, np.ndarray] | None],
    ) -> AdaptedModule:
        """Return the adapter of a module that holds a group's projections side by side."""
        rank, outputs = self._lora.rank, [matrix[-1] for matrix in group.matrices]
        count = sum(pair is not None for pair in adapted)
        b_OR = np.zeros((sum(outputs), count * rank), np.float32)
        rows, column, first = [], 0, 0
        for pair, size in zip(adapted, outputs, strict=True):
            if pair is not None:
                down, up = pair
                rows.append(down[index].reshape(-1, rank).T)
                b_OR[first : first + size, column : column + rank] = up[index].reshape(rank, -1).T
                column += rank
            first += size
        a_RI = np.ascontiguousarray(np.concatenate(rows))
        return AdaptedModule(name, count * rank, count * self._lora.alpha, a_RI, b_OR)


def _low_rank(kernel: str, end: str) -> str:
    return kernel.removesuffix(_KERNEL) + end

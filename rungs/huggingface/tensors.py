"""The tensors of a Hugging Face model: read from safetensors files, one at a time, and joined and
split by the rules of its family. Rungs stacks parameters: axis L of layers, then E of experts, if
any. Hugging Face models have one tensor per layer and expert."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open

from rungs.checkpointing.weights_file import (
    INDEX_FILE,
    SAFETENSORS_DTYPES,
    WEIGHTS_FILE,
    TensorSpec,
    bits,
    read_index,
)
from rungs.common.errors import UserError, reason
from rungs.common.paths import refuse_link_out
from rungs.common.strict_json import format_name
from rungs.config.model_config import ModelConfig
from rungs.huggingface.families.family import Rule
from rungs.parallel.sharding import dotted
from rungs.step.state import abstract_model

_DTYPES = {code: dtype for dtype, code in SAFETENSORS_DTYPES.items()}
_STACKED_AXES = ("{layer}", "{expert}")
_STRIP_ROWS = 128


class Tensors(Protocol):
    """Named tensors that are read one at a time."""

    specs: dict[str, TensorSpec]

    def bits(self, name: str) -> np.ndarray:
        """Return a tensor's content as unsigned integers."""


class TensorFolder:
    """A folder's tensors, in one safetensors file or in shards with an index. Raises UserError if
    it has no weights in this format, or a shard is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        single, index = folder / WEIGHTS_FILE, folder / INDEX_FILE
        self._files: dict[str, Path] = {}
        if not single.is_file():
            _require_safetensors(folder)
            self._files = read_index(index)
        self.specs: dict[str, TensorSpec] = {}
        """dtype and shape of each tensor, by name. Buffers may have any dtype."""
        for path in sorted(set(self._files.values())) or [single]:
            refuse_link_out(path)
            for name, spec in safetensors_specs(path).items():
                if self._files.setdefault(name, path) == path:
                    self.specs[name] = spec
        for name, path in self._files.items():
            if name not in self.specs:
                raise UserError(f"{path}: tensor {format_name(name)}: missing; {INDEX_FILE} has it")

    def bits(self, name: str) -> np.ndarray:
        """Return a tensor's content as unsigned integers."""
        with safe_open(self._files[name], framework="numpy") as file:  # each time, to free memory
            return bits(file.get_tensor(name))


def _require_safetensors(folder: Path) -> None:
    if (folder / INDEX_FILE).is_file():
        return
    if any(folder.glob("pytorch_model*.bin")):
        raise UserError(
            f"{folder}: has its weights as PyTorch files, which may contain code; convert them in a"
            f" Python with PyTorch: AutoModelForCausalLM.from_pretrained({str(folder)!r})"
            '.save_pretrained("NEW_FOLDER"), and copy the tokenizer files there'
        )
    raise UserError(f"{folder}: has no weights; needs {WEIGHTS_FILE} or {INDEX_FILE}")


def safetensors_specs(path: Path) -> dict[str, TensorSpec]:
    """Return the spec of every tensor in a file, by name. Raises UserError if it is unreadable."""
    specs = {}
    try:
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 — no mapping
                part = file.get_slice(name)
                code = part.get_dtype()
                specs[name] = TensorSpec(_DTYPES.get(code, code), tuple(part.get_shape()))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the download or copy is incomplete") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a complete safetensors file: {reason(error)}") from None
    return specs


class AbstractParameter(NamedTuple):
    """Shape of a Rungs parameter."""

    shape: tuple[int, ...]
    inputs: int
    """Number of axes, after layers and experts, that a matmul contracts."""
    is_of_experts: bool = False
    """Whether it has an axis of experts after that of layers."""
    layers: Sequence[int] | None = None
    """The layers that have it; None for all."""


def model_parameters(model: ModelConfig) -> dict[str, AbstractParameter]:
    """Return all parameters of a model, by dotted name."""
    variables = nnx.to_flat_state(nnx.state(abstract_model(model)))
    found = {}
    for path, each in variables:
        is_of_experts = len(each.axes) > 1 and each.axes[0] == "experts"
        shape = each.get_value().shape
        layers = each.get_metadata().get("layers")
        found[dotted(path)] = AbstractParameter(shape, each.inputs, is_of_experts, layers)
    return found


class TensorGroup:
    """The tensors of a rule in a model with these parameters, one per layer and expert, or one per
    layer with an axis of experts."""

    def __init__(self, rule: Rule, parameters: dict[str, AbstractParameter]) -> None:
        self.parameters = {name: parameters[name] for name in rule.parameters}
        """The parameters in the tensors, by name."""
        self.is_transposed = rule.transposed
        stacked = sum(axis in rule.hf_name for axis in _STACKED_AXES)
        indices = itertools.product(*map(range, parameters[rule.parameters[0]].shape[:stacked]))
        layers = parameters[rule.parameters[0]].layers
        places = {i: (layers[i[0]], *i[1:]) if layers else i for i in indices}
        numbers = {i: dict(zip(("layer", "expert"), n, strict=False)) for i, n in places.items()}
        self.names = {rule.hf_name.format(**each): index for index, each in numbers.items()}
        """Each tensor's name, with its index into the parameters' stacked axes."""
        self._item_shapes = [each.shape[stacked:] for each in self.parameters.values()]
        first = parameters[rule.parameters[0]]
        experts = first.shape[1:2] if first.is_of_experts and stacked == 1 else ()
        items = [shape[len(experts) :] for shape in self._item_shapes]
        self.matrices = [
            (*experts, math.prod(shape[: each.inputs]), math.prod(shape[each.inputs :]))
            if each.inputs
            else (*experts, math.prod(shape))
            for shape, each in zip(items, self.parameters.values(), strict=True)
        ]
        """Shape of each parameter's part of a tensor: (inputs, outputs), or (outputs,), after the
        experts that it has."""
        self._groups = items[0][first.inputs] if rule.interleaved else 1
        shape = (*self.matrices[0][:-1], sum(matrix[-1] for matrix in self.matrices))
        self.shape: tuple[int, ...] = shape[::-1] if rule.transposed else shape
        if rule.is_convolution:
            self.shape = shape[0] // items[0][-1], 1, items[0][-1]

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Return each parameter's part of a tensor."""
        matrix = _transpose(tensor) if self.is_transposed else tensor
        leading = self.matrices[0][:-1]
        ends = list(itertools.accumulate(shape[-1] // self._groups for shape in self.matrices))
        parts = np.split(matrix.reshape(*leading, self._groups, -1), ends[:-1], axis=-1)
        return [part.reshape(s) for part, s in zip(parts, self._item_shapes, strict=True)]

    def join(self, items: list[np.ndarray]) -> np.ndarray:
        """Return the tensor made of one part of each parameter."""
        matrices = [item.reshape(s) for item, s in zip(items, self.matrices, strict=True)]
        matrix = matrices[0] if len(matrices) == 1 else self.side_by_side(matrices)
        return _transpose(matrix) if self.is_transposed else matrix.reshape(self.shape)

    def side_by_side(self, matrices: list[np.ndarray]) -> np.ndarray:
        """Return matrices with the outputs of one parameter each, joined along the outputs."""
        leading = matrices[0].shape[:-1]
        parts = [matrix.reshape(*leading, self._groups, -1) for matrix in matrices]
        return np.concatenate(parts, axis=-1).reshape(*leading, -1)


def _transpose(matrix: np.ndarray) -> np.ndarray:
    """Return the transpose of a matrix, or a vector unchanged. Copies cache-sized strips, which is
    3.5 times as fast as a plain copy for 5632 · 2048 numbers of 16 bits."""
    if matrix.ndim < 2:
        return matrix
    transposed = np.empty(matrix.shape[::-1], matrix.dtype)
    for begin in range(0, len(matrix), _STRIP_ROWS):
        transposed[:, begin : begin + _STRIP_ROWS] = matrix[begin : begin + _STRIP_ROWS].T
    return transposed


def tensor_groups(model: ModelConfig, rules: tuple[Rule, ...]) -> list[TensorGroup]:
    """Return a model's tensors by the rules that apply to it; each parameter is in exactly one."""
    parameters = model_parameters(model)
    needed = [rule for rule in rules if set(rule.parameters) <= parameters.keys()]
    assert sorted(name for rule in needed for name in rule.parameters) == sorted(parameters)
    return [TensorGroup(rule, parameters) for rule in needed]

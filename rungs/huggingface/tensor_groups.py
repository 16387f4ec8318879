"""The tensors of a Hugging Face model by the rules of its family. Rungs stacks parameters: axis L
of layers, then E of experts, if any. Hugging Face models have one tensor per layer and expert."""

import itertools
import math
from typing import NamedTuple

import numpy as np
from flax import nnx

from rungs.config.model_config import ModelConfig
from rungs.huggingface.tensor_rules import Rule
from rungs.parallel.sharding import dotted
from rungs.step.state import abstract_model

_STACKED_AXES = ("{layer}", "{expert}")
_STRIP_ROWS = 128


class AbstractParameter(NamedTuple):
    """Shape of a Rungs parameter."""

    shape: tuple[int, ...]
    inputs: int
    """Number of axes, after layers and experts, that a matmul contracts."""


def model_parameters(model: ModelConfig) -> dict[str, AbstractParameter]:
    """Return all parameters of a model, by dotted name."""
    variables = nnx.to_flat_state(nnx.state(abstract_model(model)))
    return {
        dotted(path): AbstractParameter(each.get_value().shape, each.get_metadata()["inputs"])
        for path, each in variables
    }


class TensorGroup:
    """The tensors of a rule in a model with these parameters, one per layer and expert."""

    def __init__(self, rule: Rule, parameters: dict[str, AbstractParameter]) -> None:
        self.parameters = {name: parameters[name] for name in rule.parameters}
        """The parameters in the tensors, by name."""
        self.is_transposed = rule.transposed
        stacked = sum(axis in rule.hf_name for axis in _STACKED_AXES)
        indices = itertools.product(*map(range, parameters[rule.parameters[0]].shape[:stacked]))
        numbers = {index: dict(zip(("layer", "expert"), index, strict=False)) for index in indices}
        self.names = {rule.hf_name.format(**each): index for index, each in numbers.items()}
        """Each tensor's name, with its index into the parameters' stacked axes."""
        self._item_shapes = [each.shape[stacked:] for each in self.parameters.values()]
        self.matrices = [
            (math.prod(shape[: each.inputs]), math.prod(shape[each.inputs :]))
            if each.inputs
            else (math.prod(shape),)
            for shape, each in zip(self._item_shapes, self.parameters.values(), strict=True)
        ]
        """Shape of each parameter's part of a tensor: (inputs, outputs), or (outputs,)."""
        shape = (*self.matrices[0][:-1], sum(matrix[-1] for matrix in self.matrices))
        self.shape: tuple[int, ...] = shape[::-1] if rule.transposed else shape

    def split(self, tensor: np.ndarray) -> list[np.ndarray]:
        """Return each parameter's part of a tensor."""
        matrix = _transpose(tensor) if self.is_transposed else tensor
        ends = list(itertools.accumulate(shape[-1] for shape in self.matrices))
        parts = np.split(matrix, ends[:-1], axis=-1)
        return [part.reshape(s) for part, s in zip(parts, self._item_shapes, strict=True)]

    def join(self, items: list[np.ndarray]) -> np.ndarray:
        """Return the tensor made of one part of each parameter."""
        matrices = [item.reshape(s) for item, s in zip(items, self.matrices, strict=True)]
        matrix = matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=-1)
        return _transpose(matrix) if self.is_transposed else matrix


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

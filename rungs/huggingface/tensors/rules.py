"""Tensors of published models beside our parameters, each described once for both ways.

Our parameters are stacked: a leading axis L over the layers, then E over the experts where there
are such. Theirs are named one by one, `{layer}` and `{expert}` standing for the numbers.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from flax import nnx

from rungs.config.model_config import ModelConfig
from rungs.parallel.axes import dotted
from rungs.step.state import abstract_model

_PLACES = ("{layer}", "{expert}")
_STRIP = 128


class AbstractParameter(NamedTuple):
    """One of our parameters, in the abstract."""

    shape: tuple[int, ...]
    inputs: int
    """How many axes, after those of layers and experts, a product sums over."""

    def item_shape(self, stacked: int) -> tuple[int, ...]:
        """Shape without the axes of layers and experts."""
        return self.shape[stacked:]


def parameters(model: ModelConfig) -> dict[str, AbstractParameter]:
    """All parameters of a model, by dotted name."""
    state = nnx.state(abstract_model(model))
    return {
        dotted(path): AbstractParameter(
            variable.get_value().shape, variable.get_metadata()["inputs"]
        )
        for path, variable in nnx.to_flat_state(state)
    }


@dataclass(frozen=True)
class Rule:
    """Where a tensor of theirs stands in our parameters.

    As a matrix ours are (inputs, outputs), and where several make one tensor of theirs, they stand
    side by side in the outputs.
    """

    theirs: str
    """Name, with places for the numbers of layer and expert."""
    ours: tuple[str, ...]
    transposed: bool = False
    """Whether theirs is (outputs, inputs), as PyTorch's Linear has it."""

    @property
    def stacked(self) -> int:
        """Leading axes of ours that number layers and experts."""
        return sum(place in self.theirs for place in _PLACES)

    def names(self, ours: AbstractParameter) -> Iterator[tuple[tuple[int, ...], str]]:
        """Each tensor of theirs, with its place among the stacked axes of ours."""
        for index in itertools.product(*map(range, ours.shape[: self.stacked])):
            places = zip(("layer", "expert"), index, strict=False)
            yield index, self.theirs.format(**dict(places))

    def shape(self, ours: list[AbstractParameter]) -> tuple[int, ...]:
        """Shape of each tensor of theirs."""
        *rows, _ = self._matrix(ours[0])
        shape = (*rows, sum(self._matrix(parameter)[-1] for parameter in ours))
        return shape[::-1] if self.transposed else shape

    def split(self, theirs: np.ndarray, ours: list[AbstractParameter]) -> list[np.ndarray]:
        """The items of our parameters in a tensor of theirs."""
        matrix = _turned(theirs) if self.transposed else theirs
        ends = list(itertools.accumulate(self._matrix(parameter)[-1] for parameter in ours))
        parts = np.split(matrix, ends[:-1], axis=-1)
        return [
            part.reshape(parameter.item_shape(self.stacked))
            for part, parameter in zip(parts, ours, strict=True)
        ]

    def join(self, items: list[np.ndarray], ours: list[AbstractParameter]) -> np.ndarray:
        """The tensor of theirs that items of our parameters make."""
        matrices = [
            item.reshape(self._matrix(parameter))
            for item, parameter in zip(items, ours, strict=True)
        ]
        matrix = matrices[0] if len(matrices) == 1 else np.concatenate(matrices, axis=-1)
        return _turned(matrix) if self.transposed else matrix

    def _matrix(self, ours: AbstractParameter) -> tuple[int, ...]:
        """Shape of an item as (inputs, outputs), or (outputs,) where it is no matrix."""
        shape = ours.item_shape(self.stacked)
        if not ours.inputs:
            return (math.prod(shape),)
        return math.prod(shape[: ours.inputs]), math.prod(shape[ours.inputs :])


def _turned(matrix: np.ndarray) -> np.ndarray:
    """The transpose, copied in strips that fit a cache: 3.5 times as fast as in one go for
    5632 · 2048 numbers of 16 bits. A vector is itself."""
    if matrix.ndim < 2:
        return matrix
    turned = np.empty(matrix.shape[::-1], matrix.dtype)
    for begin in range(0, len(matrix), _STRIP):
        turned[:, begin : begin + _STRIP] = matrix[begin : begin + _STRIP].T
    return turned


def as_is(theirs: str, *ours: str) -> Rule:
    """Theirs holds the same numbers in the same order."""
    return Rule(theirs, ours)


def linear(theirs: str, ours: str) -> tuple[Rule, Rule]:
    """A Linear of theirs, with the bias it may have."""
    weight = Rule(f"{theirs}.weight", (f"{ours}.kernel",), transposed=True)
    return weight, Rule(f"{theirs}.bias", (f"{ours}.bias",))


def norm(theirs: str, ours: str) -> tuple[Rule, Rule]:
    """A norm, with the bias it may have."""
    return as_is(f"{theirs}.weight", f"{ours}.scale"), as_is(f"{theirs}.bias", f"{ours}.bias")


def used(rules: tuple[Rule, ...], ours: dict[str, AbstractParameter]) -> list[Rule]:
    """The rules that a model with these parameters needs; each parameter is in exactly one."""
    needed = [rule for rule in rules if set(rule.ours) <= ours.keys()]
    assert sorted(name for rule in needed for name in rule.ours) == sorted(ours)
    return needed

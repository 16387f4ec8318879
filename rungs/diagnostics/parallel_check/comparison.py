"""How far the result of a case is from that of one device."""

import math
from typing import NamedTuple

import numpy as np

from rungs.config.sharding_config import Mode, ShardingConfig
from rungs.planning.compiled.collectives import Traffic

ROUNDING_TOLERANCE = 1e-5
"""Largest relative difference of loss, gradient and update from one device. A float32 is rounded by
up to 6e-8 of its value. Sums in another order differed by at most 2e-7 (loss) and 1e-6 (gradient)
in the committed runs and in GPT-2's shape. A part of the gradient that is missing or counted twice
is found if it is more than this share of the total."""
MAX_REROUTED_TOKENS = 3
"""Tokens that rounding may send to another expert, if two experts score almost the same."""
REROUTED_LOSS_TOLERANCE, REROUTED_GRADIENT_TOLERANCE = 1e-3, 1e-2
"""Tolerances in that case. In runs/mixtral, one of 2,048 tokens changed a loss by 6e-5 and a
gradient by 1e-3; two of 256 tokens, by 3e-4 and 7e-3."""


class ParallelCase(NamedTuple):
    """A mesh, a sharding mode, and a split of the accumulation."""

    mode: Mode
    data: int
    last: int
    """Devices along the last mesh axis: context in cp, otherwise tensor."""
    microbatches: int
    microbatch_size: int
    balanced: bool
    """Whether the loss includes the load-balancing loss of experts."""

    @property
    def sharding(self) -> ShardingConfig:
        return ShardingConfig.of(self.mode, (self.data, self.last))


class CaseResult(NamedTuple):
    """Result of training one case."""

    losses: np.ndarray
    """Of each step, in nats per counted target."""
    gradient: dict[str, np.ndarray]
    """Of the first step, by parameter name, before clipping."""
    change: dict[str, np.ndarray]
    """Of each trained parameter, after two updates with the gradient of one device."""
    expert_tokens: np.ndarray
    """Tokens per step, layer and expert; 0 without experts."""
    bytes_per_device: int
    """Parameters and optimizer state after the last step, on the device that holds most."""
    traffic: list[Traffic]
    """Of the compiled step."""


class Difference(NamedTuple):
    """Relative difference from one device."""

    loss: float
    """The largest of all steps."""
    gradient: float
    """Norm of the difference over the norm, of all parameters together."""
    update: float
    """The same of the change that the optimizer makes with the same gradient."""
    most_in: str
    """The parameter whose gradient differs most, or whose change does if gradients agree."""
    rerouted: int
    """Tokens that went to another expert, in the step with the most."""

    @property
    def is_rerouted(self) -> bool:
        """Whether so few tokens went to other experts that rounding explains it."""
        return 0 < self.rerouted <= MAX_REROUTED_TOKENS

    @property
    def tolerances(self) -> tuple[float, float, float]:
        """Of loss, gradient and update."""
        if self.is_rerouted:
            return REROUTED_LOSS_TOLERANCE, REROUTED_GRADIENT_TOLERANCE, ROUNDING_TOLERANCE
        return ROUNDING_TOLERANCE, ROUNDING_TOLERANCE, ROUNDING_TOLERANCE

    @property
    def exceeds(self) -> tuple[bool, bool, bool]:
        """Whether loss, gradient and update exceed their tolerances. NaN does."""
        loss, gradient, update = self.tolerances
        return not self.loss <= loss, not self.gradient <= gradient, not self.update <= update


def compare(found: CaseResult, expected: CaseResult) -> Difference:
    """Return how far a result is from the expected one."""
    gradient, most_in_gradient = _relative(found.gradient, expected.gradient)
    update, most_in_change = _relative(found.change, expected.change)
    rerouted = np.abs(found.expert_tokens - expected.expert_tokens).reshape(len(found.losses), -1)
    return Difference(
        float(np.abs(found.losses / expected.losses - 1).max()),
        gradient,
        update,
        most_in_change if gradient <= ROUNDING_TOLERANCE < update else most_in_gradient,
        int(rerouted.sum(axis=-1).max()) // 2,
    )


def _relative(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> tuple[float, str]:
    """Return the norm of all differences over the norm of all that is expected, and where the
    difference is largest."""
    squares = {name: _square(found[name] - array) for name, array in expected.items()}
    norm = math.sqrt(sum(map(_square, expected.values())))
    return math.sqrt(sum(squares.values())) / norm, max(squares, key=lambda name: squares[name])


def _square(array: np.ndarray) -> float:
    """Return the sum of the squares."""
    return float(np.square(array, dtype=np.float64).sum())

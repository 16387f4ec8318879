"""Training in float16 with a loss scale. Task: `assignment/systems/tasks/mixed_precision.md`.

`Loss` is a function of weights in float16 and a batch. The weights that are trained, the moments
and the update are in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ..given import Params

Loss = Callable[[Params, Any], jax.Array]

FINITE_STEPS_TO_DOUBLE = 200


class LossScale(NamedTuple):
    scale: jax.Array
    """The factor on the loss, a power of 2 in float32."""
    finite_steps: jax.Array
    """Steps since the scale last changed, all finite."""


def to_half(tree: Any) -> Any:
    """Return a tree with arrays of floats in float16. Others, such as tokens, stay."""
    raise NotImplementedError("to_half: see assignment/systems/tasks/mixed_precision.md")


def scaled_gradients(
    loss: Loss, params: Params, batch: Any, scale: jax.Array
) -> tuple[jax.Array, Params]:
    """Return the loss and its gradients, in float32 and without the scale. What is computed between
    them, with `to_half` of weights and batch, has gradients of loss · scale.

    Args:
        loss: may return float16.
        params: in float32.
    """
    raise NotImplementedError("scaled_gradients: see assignment/systems/tasks/mixed_precision.md")


def all_finite(tree: Any) -> jax.Array:
    """Return whether no number of any array is NaN or infinite, as an array of one boolean."""
    raise NotImplementedError("all_finite: see assignment/systems/tasks/mixed_precision.md")


def next_scale(before: LossScale, is_finite: jax.Array) -> LossScale:
    """Return the scale of the next step: half after a step whose gradients were not finite, but at
    least 1; twice after FINITE_STEPS_TO_DOUBLE finite ones in a row; else the same."""
    raise NotImplementedError("next_scale: see assignment/systems/tasks/mixed_precision.md")


def mixed_step(
    loss: Loss, params: Params, moments: Params, scale: LossScale, batch: Any
) -> tuple[Params, Params, LossScale, jax.Array]:
    """Return new weights, moments and scale, and the loss, for `jax.jit`. Where gradients are not
    finite, weights and moments stay as they are, bit for bit.

    Args:
        params, moments: in float32.
    """
    raise NotImplementedError("mixed_step: see assignment/systems/tasks/mixed_precision.md")

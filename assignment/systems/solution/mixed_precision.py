"""Training in float16 with a loss scale. Task: `assignment/systems/tasks/mixed_precision.md`.

`Loss` is a function of weights in float16 and a batch. The weights that are trained, the moments
and the update are in float32.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..given import Params, sgd

Loss = Callable[[Params, Any], jax.Array]

FINITE_STEPS_TO_DOUBLE = 200


class LossScale(NamedTuple):
    scale: jax.Array
    """The factor on the loss, a power of 2 in float32."""
    finite_steps: jax.Array
    """Steps since the scale last changed, all finite."""


def to_half(tree: Any) -> Any:
    """Return a tree with arrays of floats in float16. Others, such as tokens, stay."""

    def half(array: jax.Array) -> jax.Array:
        is_float = jnp.issubdtype(array.dtype, jnp.floating)
        return array.astype(jnp.float16) if is_float else array

    return jax.tree.map(half, tree)


def scaled_gradients(
    loss: Loss, params: Params, batch: Any, scale: jax.Array
) -> tuple[jax.Array, Params]:
    """Return the loss and its gradients, in float32 and without the scale. What is computed between
    them, with `to_half` of weights and batch, has gradients of loss · scale.

    Args:
        loss: may return float16.
        params: in float32.
    """

    def scaled(half: Params) -> tuple[jax.Array, jax.Array]:
        value = loss(half, to_half(batch)).astype(jnp.float32)
        return value * scale, value

    gradients, value = jax.grad(scaled, has_aux=True)(to_half(params))
    return value, jax.tree.map(lambda g: g.astype(jnp.float32) / scale, gradients)


def all_finite(tree: Any) -> jax.Array:
    """Return whether no number of any array is NaN or infinite, as an array of one boolean."""
    return jnp.array([jnp.isfinite(array).all() for array in jax.tree.leaves(tree)]).all()


def next_scale(before: LossScale, is_finite: jax.Array) -> LossScale:
    """Return the scale of the next step: half after a step whose gradients were not finite, but at
    least 1; twice after FINITE_STEPS_TO_DOUBLE finite ones in a row; else the same."""
    finite_steps = jnp.where(is_finite, before.finite_steps + 1, 0)
    is_double = finite_steps == FINITE_STEPS_TO_DOUBLE
    factor = jnp.where(is_finite, jnp.where(is_double, 2.0, 1.0), 0.5)
    return LossScale(jnp.maximum(before.scale * factor, 1.0), jnp.where(is_double, 0, finite_steps))


def mixed_step(
    loss: Loss, params: Params, moments: Params, scale: LossScale, batch: Any
) -> tuple[Params, Params, LossScale, jax.Array]:
    """Return new weights, moments and scale, and the loss, for `jax.jit`. Where gradients are not
    finite, weights and moments stay as they are, bit for bit.

    Args:
        params, moments: in float32.
    """
    value, gradients = scaled_gradients(loss, params, batch, scale.scale)
    is_finite = all_finite(gradients)
    updated = sgd(params, moments, gradients)
    params, moments = jax.tree.map(
        lambda new, old: jnp.where(is_finite, new, old), updated, (params, moments)
    )
    return params, moments, next_scale(scale, is_finite), value

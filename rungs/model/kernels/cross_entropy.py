"""Cross-entropy of an output head, which never holds the logits of all tokens.

The tokens go through the head and the loss some at a time. Where a gradient is wanted it is made
while a chunk's logits are there: the loss is a sum, so all that the backward pass adds is one
factor (as in Hsu et al. 2024, «Liger Kernel», section 3.2). The plain form is `target_losses` of
all logits.

Axes as in `model.py`, and M for the tokens of all sequences.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rungs.parallel import collectives, target_device
from rungs.parallel.names import TENSOR

LOGITS_BYTES = {"cpu": 8 << 20}
"""Of a chunk, for each kind of device: those of a CPU stay in its cache."""
OTHER_LOGITS_BYTES = 1 << 30
FEWEST_TOKENS = 64
"""In a chunk: with fewer, the weights' way through memory takes longer than the products."""

Head = Callable[[Array, Array], Array]
"""From x_MD and the head's matrix to logits_MV, float32; of this device's part of the vocabulary,
where devices share it."""


def summed_loss(head: Head, x_MD: Array, matrix: Array, targets_M: Array) -> Array:
    """Cross-entropy summed over the targets that count, in nats; a scalar.

    Args:
        head: a function of its arguments alone.
        matrix: its gradient is summed in float32, whatever its type.
        targets_M: negative where a target does not count.
    """
    return _summed_loss(
        head, *collectives.to_common_varying(x_MD, matrix.astype(jnp.float32)), targets_M
    )


def losses(head: Head, x_MD: Array, matrix: Array, targets_M: Array) -> Array:
    """losses_M, without a way back."""
    chunks = _chunks(x_MD, matrix, targets_M)
    found = jax.lax.map(lambda chunk: target_losses(head(chunk[0], matrix), chunk[1]), chunks)
    return found.reshape(-1)[: len(targets_M)]


def target_losses(logits: Array, targets: Array) -> Array:
    """Cross-entropy at each target in nats: log Σ exp(logits) − the target's logit; 0 where the
    target is negative, which means that it does not count. Where devices share the vocabulary,
    each has the logits of its part.

    Args:
        logits: a last axis V more than `targets` has.
    """
    return _soft_max(logits, targets).losses


class SoftMax(NamedTuple):
    losses: Array
    exponentials: Array
    """Of the logits less the largest: shaped as logits."""
    totals: Array
    """Their sums over the vocabulary."""
    own: Array
    """The targets' places among this device's logits; those of others are outside."""


def _soft_max(logits: Array, targets: Array) -> SoftMax:
    rows = logits.shape[-1]
    own = jnp.maximum(targets, 0) - collectives.vocabulary_offset(rows)
    is_here = (own >= 0) & (own < rows)
    largest = collectives.pmax(jax.lax.stop_gradient(logits).max(axis=-1), TENSOR)
    lowered = logits - largest[..., None]
    target = jnp.take_along_axis(lowered, jnp.where(is_here, own, 0)[..., None], -1)
    target = collectives.psum(jnp.where(is_here, target[..., 0], 0), TENSOR)
    exponentials = jnp.exp(lowered)
    totals = collectives.psum(exponentials.sum(axis=-1), TENSOR)
    found = jnp.where(targets >= 0, jnp.log(totals) - target, 0)
    return SoftMax(found, exponentials, totals, own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_loss(head: Head, x_MD: Array, matrix: Array, targets_M: Array) -> Array:
    return losses(head, x_MD, matrix, targets_M).sum()


def _forward(
    head: Head, x_MD: Array, matrix: Array, targets_M: Array
) -> tuple[Array, tuple[Array, Array]]:
    def through(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        x_MD, targets_M = chunk
        logits_MV, pull = jax.vjp(head, x_MD, matrix)
        soft_max = _soft_max(logits_MV, targets_M)
        x_gradient_MD, gradient = pull(_by_logits(soft_max, targets_M))
        return total + gradient, (soft_max.losses.sum(), x_gradient_MD)

    nothing = jnp.zeros_like(matrix)
    chunks = _chunks(x_MD, matrix, targets_M)
    gradient, (found, x_gradient) = jax.lax.scan(through, nothing, chunks)
    x_gradient_MD = x_gradient.reshape(-1, x_MD.shape[1])[: len(x_MD)]
    return found.sum(), (x_gradient_MD, gradient)


def _backward(_: Head, made: tuple[Array, Array], factor: Array) -> tuple[Array, Array, None]:
    x_gradient_MD, gradient = ((g * factor).astype(g.dtype) for g in made)
    return x_gradient_MD, gradient, None


_summed_loss.defvjp(_forward, _backward)


def _by_logits(soft_max: SoftMax, targets_M: Array) -> Array:
    """The gradient of the summed loss: probabilities, less 1 at the target."""
    counts_M1 = jnp.where(targets_M >= 0, 1.0, 0.0)[:, None]
    share_M1 = counts_M1 / soft_max.totals[:, None]
    is_target_MV = jnp.arange(soft_max.exponentials.shape[1]) == soft_max.own[:, None]
    return soft_max.exponentials * share_M1 - jnp.where(is_target_MV, counts_M1, 0)


def _chunks(x_MD: Array, matrix: Array, targets_M: Array) -> tuple[Array, Array]:
    """Chunks of alike size, their tokens in order; the last is filled with targets that do not
    count."""
    size = chunk_tokens(len(targets_M), matrix.size // x_MD.shape[1])
    count = math.ceil(len(targets_M) / size)
    more = count * size - len(targets_M)
    x_MD = jnp.pad(x_MD, ((0, more), (0, 0)))
    targets_M = jnp.pad(targets_M, (0, more), constant_values=-1)
    return x_MD.reshape(count, size, -1), targets_M.reshape(count, size)


def chunk_tokens(tokens: int, vocabulary: int) -> int:
    """How many of so many tokens are in a chunk."""
    room = LOGITS_BYTES.get(target_device.platform(), OTHER_LOGITS_BYTES)
    by_room = math.ceil(tokens * vocabulary * jnp.float32.dtype.itemsize / room)
    return math.ceil(tokens / max(min(by_room, tokens // FEWEST_TOKENS), 1))

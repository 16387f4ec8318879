"""Cross-entropy of an output head, without the logits of all tokens in memory at once.

One chunk of tokens at a time goes through the head and the loss. The gradient is computed in the
forward pass, while a chunk's logits exist: the loss is a sum, so the backward pass only multiplies
by one factor (as in Hsu et al. 2024, "Liger Kernel", section 3.2). The plain form is
`target_losses` of all logits.

Axes as in `gpt.py`.
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
"""The size of a chunk's logits by platform; on a CPU they fit into its cache."""
OTHER_LOGITS_BYTES = 1 << 30
MIN_CHUNK_TOKENS = 64
"""With fewer tokens in a chunk, reading the weights takes longer than the matmul."""

Head = Callable[[Array, Array], Array]
"""From x_MD and the head's matrix to logits_MV, float32. If the vocabulary is split over devices,
these are the logits of this device's part."""


@jax.named_scope("loss")
def summed_loss(head: Head, x_MD: Array, matrix: Array, targets_M: Array) -> Array:
    """Return the cross-entropy summed over the targets that are not negative, in nats.

    Args:
        head: a pure function of its arguments.
        matrix: of any dtype; its gradient is accumulated in float32.
        targets_M: token ids, negative where a target does not count.
    """
    return _summed_loss(
        head, *collectives.to_common_varying(x_MD, matrix.astype(jnp.float32)), targets_M
    )


def losses(head: Head, x_MD: Array, matrix: Array, targets_M: Array) -> Array:
    """Return losses_M, without a gradient; arguments as for `summed_loss`."""
    chunks = _chunks(x_MD, matrix, targets_M)
    by_chunk = jax.lax.map(lambda chunk: target_losses(head(chunk[0], matrix), chunk[1]), chunks)
    return by_chunk.reshape(-1)[: len(targets_M)]


def target_losses(logits: Array, targets: Array) -> Array:
    """Return the cross-entropy at each target in nats: log Σ exp(logits) − the target's logit; 0
    where the target is negative. If the vocabulary is split over devices, each has the logits of
    its part.

    Args:
        logits: of the shape of `targets` with a last axis V added.
    """
    return _softmax(logits, targets).losses


class Softmax(NamedTuple):
    losses: Array
    exponentials: Array
    """exp(logits − the largest logit), in the shape of the logits."""
    totals: Array
    """Their sums over the vocabulary."""
    own: Array
    """The targets' indices in this device's logits; out of range for another device's targets."""


def _softmax(logits: Array, targets: Array) -> Softmax:
    rows = logits.shape[-1]
    own = jnp.maximum(targets, 0) - collectives.vocabulary_offset(rows)
    is_here = (own >= 0) & (own < rows)
    largest = collectives.pmax(jax.lax.stop_gradient(logits).max(axis=-1), TENSOR)
    shifted = logits - largest[..., None]
    target = jnp.take_along_axis(shifted, jnp.where(is_here, own, 0)[..., None], -1)
    target = collectives.psum(jnp.where(is_here, target[..., 0], 0), TENSOR)
    exponentials = jnp.exp(shifted)
    totals = collectives.psum(exponentials.sum(axis=-1), TENSOR)
    losses = jnp.where(targets >= 0, jnp.log(totals) - target, 0)
    return Softmax(losses, exponentials, totals, own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed_loss(head: Head, x_MD: Array, matrix: Array, targets_M: Array) -> Array:
    return losses(head, x_MD, matrix, targets_M).sum()


def _forward(
    head: Head, x_MD: Array, matrix: Array, targets_M: Array
) -> tuple[Array, tuple[Array, Array]]:
    # The loop keeps the matrix as its matmuls read it, so in half the memory.
    operand = matrix.astype(x_MD.dtype)

    def add_chunk(total: Array, chunk: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        x_MD, targets_M = chunk
        logits_MV, pull = jax.vjp(head, x_MD, operand.astype(matrix.dtype))
        softmax = _softmax(logits_MV, targets_M)
        x_gradient_MD, gradient = pull(_logits_gradient(softmax, targets_M))
        return total + gradient, (softmax.losses.sum(), x_gradient_MD)

    zeros = jnp.zeros_like(matrix)
    chunks = _chunks(x_MD, matrix, targets_M)
    gradient, (chunk_losses, x_gradient) = jax.lax.scan(add_chunk, zeros, chunks)
    x_gradient_MD = x_gradient.reshape(-1, x_MD.shape[1])[: len(x_MD)]
    return chunk_losses.sum(), (x_gradient_MD, gradient)


def _backward(_: Head, gradients: tuple[Array, Array], factor: Array) -> tuple[Array, Array, None]:
    x_gradient_MD, gradient = ((g * factor).astype(g.dtype) for g in gradients)
    return x_gradient_MD, gradient, None


_summed_loss.defvjp(_forward, _backward)


def _logits_gradient(softmax: Softmax, targets_M: Array) -> Array:
    """Return the gradient of the summed loss: the probabilities, minus 1 at the target."""
    counts_M1 = jnp.where(targets_M >= 0, 1.0, 0.0)[:, None]
    share_M1 = counts_M1 / softmax.totals[:, None]
    is_target_MV = jnp.arange(softmax.exponentials.shape[1]) == softmax.own[:, None]
    return softmax.exponentials * share_M1 - jnp.where(is_target_MV, counts_M1, 0)


def _chunks(x_MD: Array, matrix: Array, targets_M: Array) -> tuple[Array, Array]:
    """Return chunks of equal size, in order; the last is padded with targets that don't count."""
    size = chunk_tokens(len(targets_M), matrix.size // x_MD.shape[1])
    count = math.ceil(len(targets_M) / size)
    padding = count * size - len(targets_M)
    x_MD = jnp.pad(x_MD, ((0, padding), (0, 0)))
    targets_M = jnp.pad(targets_M, (0, padding), constant_values=-1)
    return x_MD.reshape(count, size, -1), targets_M.reshape(count, size)


def chunk_tokens(tokens: int, vocabulary: int) -> int:
    """Return the number of tokens in a chunk, of this many in total."""
    max_bytes = LOGITS_BYTES.get(target_device.platform(), OTHER_LOGITS_BYTES)
    chunks = math.ceil(tokens * vocabulary * jnp.float32.dtype.itemsize / max_bytes)
    return math.ceil(tokens / max(min(chunks, tokens // MIN_CHUNK_TOKENS), 1))

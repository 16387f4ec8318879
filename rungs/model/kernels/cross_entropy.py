"""Cross-entropy of an output head without the logits of all tokens in memory.

One chunk of tokens at a time goes through head and loss. The gradient is computed in the forward
pass, while a chunk's logits exist; the loss is a sum, so the backward pass only multiplies it by
one factor (as in Hsu et al. 2024, "Liger Kernel", section 3.2). The plain form is `target_losses`.

Axes as in `gpt.py`."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from rungs.parallel import collectives, sharding, target_device

LOGITS_BYTES = {"cpu": 8 << 20}
"""Size of a chunk's logits by platform; on a CPU they fit into its cache."""
OTHER_LOGITS_BYTES = 1 << 30
LONGEST_ROW = 8192
"""Most logits that are reduced at once. XLA splits longer rows itself, into odd lengths that a GPU
reads one number at a time."""
MIN_CHUNK_TOKENS = 512
"""With fewer tokens per chunk, accumulating the matrix's gradient takes as long as the matmuls."""
TILE_ROWS = 128
"""A GPU's matmuls compute this many rows together. Chunks of whole tiles that need no padding are
preferred, if they are at least half as large."""

T = TypeVar("T")
Head = Callable[[Array, Array], Array]
"""From x_MD and the head's matrix to float32 logits_MV; if split, this device's part of them."""
WeightOf = Callable[..., Array]
"""Pure function from the targets' log_probs_M and more arrays of M to their losses' weights."""


class TargetStatistics(NamedTuple):
    """Log-probability of each target, and entropy of the distribution there: float32, in nats,
    without gradients; 0 where a target is ignored."""

    log_probs_M: Array
    entropies_M: Array


def summed_loss(head: Head, x_MD: Array, matrix: Array, targets_M: Array) -> Array:
    """Return the cross-entropy in nats over non-negative targets; arguments as for
    `weighted_loss`."""
    return weighted_loss(head, jnp.ones_like, x_MD, matrix, targets_M)[0]


@jax.named_scope("loss")
def weighted_loss(
    head: Head,
    weight_of: WeightOf,
    x_MD: Array,
    matrix: Array,
    targets_M: Array,
    extras: tuple[Array, ...] = (),
) -> tuple[Array, TargetStatistics]:
    """Return the weighted cross-entropy summed over non-negative targets.

    No gradient flows through the weights. As ∇(w · p ÷ q) = (w · p ÷ q) · ∇ log p, the gradient of
    a policy with importance ratios p ÷ q is that of a cross-entropy with these weights.

    Args:
        head: a pure function of its arguments.
        weight_of: called with the log-probabilities of a chunk's targets and its part of `extras`;
            its results for ignored targets are not used.
        matrix: of any dtype; its gradient is accumulated in float32.
        targets_M: token ids, negative where a target is ignored.
        extras: arrays with leading axis M."""
    x_MD, matrix = collectives.to_common_varying(x_MD, matrix.astype(jnp.float32))
    # Else the gradient of what made x would read the factor's product in float32.
    x_MD = target_device.gpu_gradient_barrier(x_MD)
    return _weighted_loss(head, weight_of, x_MD, matrix, targets_M, extras)


def target_scores(head: Head, x_MD: Array, matrix: Array, targets_M: Array) -> tuple[Array, Array]:
    """Return log_probs_M as in `TargetStatistics`, and is_largest_M, whether no token has a larger
    logit, True where a target is ignored; arguments as for `weighted_loss`."""

    def score(logits_MV: Array, targets_M: Array) -> tuple[Array, Array]:
        softmax = _softmax(logits_MV, targets_M)
        is_largest_M = softmax.losses == jnp.log(softmax.totals)  # its logit is the largest
        return -softmax.losses, is_largest_M | (targets_M < 0)

    return _map_chunks(score, head, x_MD, matrix, targets_M)


def target_statistics(head: Head, x_MD: Array, matrix: Array, targets_M: Array) -> TargetStatistics:
    """Return only the statistics; arguments as for `weighted_loss`."""

    def statistics(logits_MV: Array, targets_M: Array) -> TargetStatistics:
        return _statistics(_softmax(logits_MV, targets_M), targets_M)

    return _map_chunks(statistics, head, x_MD, matrix, targets_M)


def _map_chunks(
    function: Callable[..., T],
    head: Head,
    x_MD: Array,
    matrix: Array,
    targets_M: Array,
    *extras: Array,
) -> T:
    """Return a function of logits_MV, targets_M and extras for all tokens, chunk by chunk."""

    @jax.checkpoint
    def of_chunk(chunk: tuple[Array, ...]) -> T:
        x_MD, *arrays = chunk
        return function(head(x_MD, matrix), *arrays)

    by_chunk = jax.lax.map(of_chunk, _chunks(matrix, targets_M, x_MD, *extras))
    return _joined(by_chunk, len(targets_M))


@jax.named_scope("loss")
def map_logits(
    function: Callable[..., Array],
    head: Head,
    x_MD: Array,
    matrix: Array,
    targets_M: Array,
    extras: tuple[Array, ...] = (),
) -> Array:
    """Return a function of each token's logits, with gradients. The backward pass computes each
    chunk's logits again; other arguments as for `weighted_loss`.

    Args:
        function: from a chunk's logits_MV, targets_M and extras to an array with leading axis M."""
    x_MD, matrix = collectives.to_common_varying(x_MD, matrix.astype(jnp.float32))
    return _map_chunks(function, head, x_MD, matrix, targets_M, *extras)


def target_losses(logits: Array, targets: Array) -> Array:
    """Return the cross-entropy at each target in nats: log Σ exp(logits) − the target's logit; 0
    where the target is negative. `logits` has the shape of `targets` plus a last axis V, this
    device's part if the vocabulary is split."""
    return _softmax(logits, targets, _in_two_passes).losses


class Softmax(NamedTuple):
    losses: Array
    shifted: Array
    """Logits − the largest logit."""
    exponentials: Array
    """exp(shifted)."""
    totals: Array
    """Sum of the exponentials over the vocabulary."""
    own: Array
    """The targets' indices in this device's logits; out of range for another device's targets."""


def _softmax(
    logits: Array, targets: Array, reduce: Callable[[Array], tuple[Array, Array]] | None = None
) -> Softmax:
    """Return the common parts of losses and gradients. `reduce` returns each row's largest logit
    and sum of exp(logits − largest); None for the fastest, which may have no derivative."""
    reduce = reduce or (_in_one_pass if target_device.platform() == "gpu" else _in_two_passes)
    rows = logits.shape[-1]
    own = jnp.maximum(targets, 0) - collectives.vocabulary_offset(rows)
    is_here = (own >= 0) & (own < rows)
    largest, totals = reduce(logits)
    # From the logits, as XLA would write `shifted` besides the exponentials if this read it.
    target = jnp.take_along_axis(logits, jnp.where(is_here, own, 0)[..., None], -1)[..., 0]
    target = collectives.psum(jnp.where(is_here, target - largest, 0), sharding.TENSOR)
    shifted = logits - largest[..., None]
    losses = jnp.where(targets >= 0, jnp.log(totals) - target, 0)
    return Softmax(losses, shifted, jnp.exp(shifted), totals, own)


def _in_two_passes(logits: Array) -> tuple[Array, Array]:
    largest = collectives.pmax(jax.lax.stop_gradient(logits).max(axis=-1), sharding.TENSOR)
    exponentials = jnp.exp(logits - largest[..., None])
    return largest, collectives.psum(exponentials.sum(axis=-1), sharding.TENSOR)


def _in_one_pass(logits: Array) -> tuple[Array, Array]:
    """Reduce before the largest is known (Milakov & Gimelshein 2018)."""
    lowest = jnp.finfo(jnp.float32).min  # −∞ − −∞ would be NaN
    rows = logits.shape[-1]
    parts = 1
    while rows // parts > LONGEST_ROW and rows % (2 * parts) == 0:
        parts *= 2
    split = jnp.maximum(logits, lowest).reshape(*logits.shape[:-1], parts, rows // parts)
    own_largest, own_totals = _joined_sums(*_joined_sums(split, jnp.ones_like(split)))
    largest = collectives.pmax(own_largest, sharding.TENSOR)
    return largest, collectives.psum(own_totals * jnp.exp(own_largest - largest), sharding.TENSOR)


def _joined_sums(largest: Array, totals: Array) -> tuple[Array, Array]:
    """Return the largest logit and the sum of exp(logit − largest), joined along the last axis."""

    def join(one: tuple[Array, Array], two: tuple[Array, Array]) -> tuple[Array, Array]:
        above = one[0] - two[0]
        factor = jnp.exp(-jnp.abs(above))  # for the sum with the smaller maximum
        joined = jnp.where(above > 0, one[1] + factor * two[1], factor * one[1] + two[1])
        return jnp.maximum(one[0], two[0]), joined

    starts = jnp.finfo(jnp.float32).min, jnp.float32(0)
    return jax.lax.reduce((largest, totals), starts, join, (largest.ndim - 1,))


def _statistics(softmax: Softmax, targets_M: Array) -> TargetStatistics:
    # 0 · −∞ in the vocabulary's padding would be NaN
    shifted_MV = jnp.where(softmax.exponentials > 0, softmax.shifted, 0)
    products_M = collectives.psum((softmax.exponentials * shifted_MV).sum(axis=-1), sharding.TENSOR)
    entropies_M = jnp.log(softmax.totals) - products_M / softmax.totals
    return TargetStatistics(-softmax.losses, jnp.where(targets_M >= 0, entropies_M, 0))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _weighted_loss(
    head: Head,
    weight_of: WeightOf,
    x_MD: Array,
    matrix: Array,
    targets_M: Array,
    extras: tuple[Array, ...],
) -> tuple[Array, TargetStatistics]:
    statistics = target_statistics(head, x_MD, matrix, targets_M)
    weights_M = jnp.where(targets_M >= 0, weight_of(statistics.log_probs_M, *extras), 0.0)
    return -(weights_M * statistics.log_probs_M).sum(), statistics


def _forward(
    head: Head,
    weight_of: WeightOf,
    x_MD: Array,
    matrix: Array,
    targets_M: Array,
    extras: tuple[Array, ...],
) -> tuple[tuple[Array, TargetStatistics], tuple[Array, Array]]:
    # The loop keeps the matrix in the dtype of its matmuls, in half the memory.
    operand = matrix.astype(x_MD.dtype)

    def add_chunk(total: Array, chunk: tuple[Array, ...]) -> tuple[Array, Any]:
        x_MD, targets_M, *extras = chunk
        logits_MV, pull = jax.vjp(head, x_MD, operand.astype(matrix.dtype))
        softmax = _softmax(logits_MV, targets_M)
        statistics = _statistics(softmax, targets_M)
        weights_M = jnp.where(targets_M >= 0, weight_of(statistics.log_probs_M, *extras), 0.0)
        x_gradient_MD, gradient = pull(_logits_gradient(softmax, weights_M))
        loss = (weights_M * softmax.losses).sum()
        return total + gradient, (loss, statistics, x_gradient_MD)

    zeros = jnp.zeros_like(matrix)
    chunks = _chunks(matrix, targets_M, x_MD, *extras)
    gradient, (losses, statistics, x_gradient) = jax.lax.scan(add_chunk, zeros, chunks)
    statistics, x_gradient_MD = _joined((statistics, x_gradient), len(targets_M))
    return (losses.sum(), statistics), (x_gradient_MD, gradient)


def _backward(
    _head: Head,
    _weight_of: WeightOf,
    gradients: tuple[Array, Array],
    factors: tuple[Array, TargetStatistics],
) -> tuple[Array, Array, None, None]:
    factor, _ = factors  # the statistics have no gradient
    x_gradient_MD, gradient = ((g * factor).astype(g.dtype) for g in gradients)
    return x_gradient_MD, gradient, None, None


_weighted_loss.defvjp(_forward, _backward)


def _logits_gradient(softmax: Softmax, weights_M: Array) -> Array:
    """Return the gradient of the weighted loss: (probabilities − 1 at the target) · weight."""
    share_M1 = weights_M[:, None] / softmax.totals[:, None]
    is_target_MV = jnp.arange(softmax.exponentials.shape[1]) == softmax.own[:, None]
    return softmax.exponentials * share_M1 - jnp.where(is_target_MV, weights_M[:, None], 0)


def _chunks(matrix: Array, targets_M: Array, x_MD: Array, *extras: Array) -> tuple[Array, ...]:
    """Return equal chunks of x_MD, targets and the others, the last padded with ignored targets."""
    size = chunk_tokens(len(targets_M), matrix.size // x_MD.shape[1])
    count = math.ceil(len(targets_M) / size)
    padding = count * size - len(targets_M)

    def split(array: Array, filler: int = 0) -> Array:
        widths = [(0, padding)] + [(0, 0)] * (array.ndim - 1)
        padded = jnp.pad(array, widths, constant_values=filler)
        return padded.reshape(count, size, *array.shape[1:])

    return split(x_MD), split(targets_M, -1), *map(split, extras)


def _joined(by_chunk: Any, tokens: int) -> Any:
    """Return the chunks' arrays concatenated along axis M."""
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:tokens], by_chunk)


def chunk_tokens(tokens: int, vocabulary: int) -> int:
    """Return the number of tokens per chunk for this many in total."""
    platform = target_device.platform()
    max_bytes = LOGITS_BYTES.get(platform, OTHER_LOGITS_BYTES)
    needed = math.ceil(tokens * vocabulary * jnp.float32.dtype.itemsize / max_bytes)
    most = max(tokens // MIN_CHUNK_TOKENS, 1)
    chunks = min(needed, most)
    if platform == "gpu":
        counts = range(chunks, min(2 * chunks, most) + 1)
        chunks = next((n for n in counts if tokens % (n * TILE_ROWS) == 0), chunks)
    return math.ceil(tokens / chunks)

"""Causal attention over full sequences, one block of queries at a time.

A block computes scores only for keys that one of its queries attends to, which is half of the
square, and the scores of all queries never exist at once. The backward pass recomputes the
attention weights from the log-sum-exp, a float for each query (Dao et al. 2022, "FlashAttention",
sections 3.1 and B.2). The plain form is `attention.plain_attention`.

Axes as in `gpt.py`, and
    X key heads of all sequences (B · K), G query heads per key head,
    Q queries of a block times the heads that share a key head (G · the block's length).
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rungs.model.kernels.matmul import optimization_barrier, transpose_in_memory
from rungs.model.remat import save_for_backward
from rungs.parallel import collectives

MIN_QUERIES, MAX_QUERIES = 64, 256
"""Queries in a block."""
PREFERRED_BLOCKS = 8
"""Blocks in a sequence, if that gives an allowed number of queries."""
MASKED_SCORE = -1e30
"""Finite, because its difference from itself must be 0."""


class Scoring(NamedTuple):
    """How queries and keys become scores."""

    scale: float
    window: int | None
    """The number of keys up to its own that a query attends to at most; None for all."""
    soft_cap: float | None

    def is_seen(self, distance: Array) -> Array:
        """Return whether a query attends to a key that is so many tokens before it."""
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)


class QueryBlock(NamedTuple):
    """The queries from `first` to before `end`, which attend to keys from `first_key` to before
    `end`."""

    first: int
    end: int
    first_key: int

    def queries(self, x_XGSH: Array) -> Array:
        """Return the part of x for the block's queries: x_XQH."""
        part = x_XGSH[:, :, self.first : self.end]
        return part.reshape(part.shape[0], -1, part.shape[3])

    def keys(self, x_XTH: Array) -> Array:
        """Return the part of x for the keys that the block attends to."""
        return x_XTH[:, self.first_key : self.end]


def query_blocks(length: int, window: int | None) -> Iterator[QueryBlock]:
    """Yield the blocks of a sequence, in order."""
    size = min(max(-(-length // PREFERRED_BLOCKS), MIN_QUERIES), MAX_QUERIES)
    for first in range(0, length, size):
        first_key = 0 if window is None else max(first - window + 1, 0)
        yield QueryBlock(first, min(first + size, length), first_key)


def causal_attention(
    query_BSNH: Array,
    key_BSKH: Array,
    value_BSKH: Array,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    starts_BS: Array | None = None,
) -> Array:
    """Return y_BSNH in the dtype of query; matmuls accumulate in float32.

    Args:
        scale: see `Scoring`.
        window: see `Scoring`.
        soft_cap: see `Scoring`.
        starts_BS: the position of the first key that each query may attend to, at most its own;
            None for 0.
    """
    scoring = Scoring(scale, window, soft_cap)
    arrays = collectives.to_common_varying(query_BSNH, key_BSKH, value_BSKH)
    return _attention(scoring, *arrays, starts_BS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    scoring: Scoring, query: Array, key: Array, value: Array, starts: Array | None
) -> Array:
    return _forward(scoring, query, key, value, starts)[0]


def _forward(
    scoring: Scoring, query: Array, key: Array, value: Array, starts: Array | None
) -> tuple[Array, tuple[Array | None, ...]]:
    query_XGSH, key_XTH, value_XTH = _queries(query, key), _keys(key), _keys(value)
    parts, log_sums = [], []
    for block in query_blocks(query.shape[1], scoring.window):
        scores_XQT, _ = _scores(scoring, block, query_XGSH, key_XTH, starts)
        largest = scores_XQT.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores_XQT - largest)
        total = weights.sum(axis=-1, keepdims=True)
        y_XQH = _dot(weights.astype(value.dtype), block.keys(value_XTH), 2, 1) / total
        parts.append(_by_group(query_XGSH, y_XQH))
        log_sums.append(largest + jnp.log(total))
    y = save_for_backward(_as_queries(query, jnp.concatenate(parts, axis=2)))
    log_sum = save_for_backward(jnp.concatenate(log_sums, axis=1))
    return y, (query, key, value, starts, y, log_sum)


def _backward(
    scoring: Scoring, residuals: tuple[Array, ...], gradient: Array
) -> tuple[Array, Array, Array, None]:
    query, key, value, starts, y, log_sum = residuals
    query_XGSH, key_XTH, value_XTH = _queries(query, key), _keys(key), _keys(value)
    gradient_XGSH, y_XGSH = _queries(gradient, key), _queries(y, key)
    query_parts, key_parts, value_parts, row = [], [], [], 0
    for block in query_blocks(query.shape[1], scoring.window):
        scores_XQT, slope = _scores(scoring, block, query_XGSH, key_XTH, starts)
        query_XQH, dy_XQH = block.queries(query_XGSH), block.queries(gradient_XGSH)
        rows = query_XQH.shape[1]
        weights = jnp.exp(scores_XQT - log_sum[:, row : row + rows])
        row += rows
        dy_times_y = dy_XQH.astype(jnp.float32) * block.queries(y_XGSH).astype(jnp.float32)
        weight_gradient = _dot(dy_XQH, block.keys(value_XTH), 2, 2) - dy_times_y.sum(
            axis=-1, keepdims=True
        )
        score_gradient = (weights * weight_gradient * slope).astype(query.dtype)
        query_parts.append(_by_group(query_XGSH, _dot(score_gradient, block.keys(key_XTH), 2, 1)))
        key_parts.append(
            (
                block,
                optimization_barrier(_dot(transpose_in_memory(query_XQH), score_gradient, 2, 1)),
            )
        )
        weights = weights.astype(query.dtype)
        value_parts.append(
            (block, optimization_barrier(_dot(transpose_in_memory(dy_XQH), weights, 2, 1)))
        )
    return (
        _as_queries(query, jnp.concatenate(query_parts, axis=2)),
        _as_keys(key, key_parts),
        _as_keys(value, value_parts),
        None,
    )


_attention.defvjp(_forward, _backward)


def _scores(
    scoring: Scoring,
    block: QueryBlock,
    query_XGSH: Array,
    key_XTH: Array,
    starts_BS: Array | None,
) -> tuple[Array, Array | float]:
    """Return scores_XQT of a block, and their derivative with respect to query · key."""
    scores = _dot(block.queries(query_XGSH), block.keys(key_XTH), 2, 2) * scoring.scale
    slope: Array | float = scoring.scale
    if scoring.soft_cap is not None:
        share = jnp.tanh(scores / scoring.soft_cap)
        scores, slope = scoring.soft_cap * share, scoring.scale * (1 - share * share)
    keys_T = jnp.arange(block.first_key, block.end)
    mask = scoring.is_seen(jnp.arange(block.first, block.end)[:, None] - keys_T)
    if starts_BS is not None:
        mask = mask & (keys_T >= starts_BS[:, block.first : block.end, None])
        mask = jnp.repeat(mask, query_XGSH.shape[0] // len(mask), axis=0)
    mask = jnp.concatenate([mask] * query_XGSH.shape[1], axis=-2)
    return jnp.where(mask, scores, MASKED_SCORE), slope


def _queries(x_BSNH: Array, key_BSKH: Array) -> Array:
    """Return x_XGSH."""
    batch, length, heads, width = x_BSNH.shape
    kv_heads = key_BSKH.shape[2]
    by_head = x_BSNH.reshape(batch, length, kv_heads, heads // kv_heads, width)
    return by_head.transpose(0, 2, 3, 1, 4).reshape(-1, heads // kv_heads, length, width)


def _as_queries(query_BSNH: Array, x_XGSH: Array) -> Array:
    """Return x in the layout and dtype of the queries."""
    batch, length, heads, width = query_BSNH.shape
    x = x_XGSH.reshape(batch, heads, length, width).swapaxes(1, 2)
    return x.astype(query_BSNH.dtype)


def _keys(x_BSKH: Array) -> Array:
    """Return x_XTH."""
    batch, length, heads, width = x_BSKH.shape
    return x_BSKH.swapaxes(1, 2).reshape(batch * heads, length, width)


def _as_keys(key_BSKH: Array, parts: list[tuple[QueryBlock, Array]]) -> Array:
    """Return the sum of the blocks' gradients x_XHT, in the layout and dtype of the keys."""
    batch, length, heads, width = key_BSKH.shape
    padding = [((0, 0), (0, 0), (block.first_key, length - block.end)) for block, _ in parts]
    padded = [jnp.pad(x_XHT, by) for (_, x_XHT), by in zip(parts, padding, strict=True)]
    x_XHT = functools.reduce(jnp.add, padded)
    x_BSKH = x_XHT.reshape(batch, heads, width, length).transpose(0, 3, 1, 2)
    return x_BSKH.astype(key_BSKH.dtype)


def _by_group(x_XGSH: Array, part_XQH: Array) -> Array:
    """Return a block's part with an axis for its heads: x_XGSH."""
    groups, width = x_XGSH.shape[1], x_XGSH.shape[3]
    return part_XQH.reshape(part_XQH.shape[0], groups, -1, width)


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    contracted = (((left_axis,), (right_axis,)), ((0,), (0,)))
    return jax.lax.dot_general(left, right, contracted, preferred_element_type=jnp.float32)

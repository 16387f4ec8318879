"""Attention over whole sequences in blocks of queries, which never holds the scores of all.

A block's queries meet only the keys that some of them may see, so half of the square is never
computed. The backward pass makes the weights again from the logarithm of their sums, a float for
each query (Dao et al. 2022, «FlashAttention», sections 3.1 and B.2). The plain form is
`attention.plain_attention`.

Axes as in `model.py`, and X for the key heads of all sequences, B · K of them; G for the query
heads that share one; Q for the queries of a block and those heads, G times the block's length.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rungs.model.kernels.matmul import opaque, transposed
from rungs.model.remat import save_for_backward
from rungs.parallel import collectives

SHORTEST, LONGEST, MOST = 64, 256, 8
"""Queries of a block, and blocks of a sequence where that allows it."""
HIDDEN = -1e30
"""In place of a score that is not to be seen; finite, as its difference from itself must be 0."""


class Scoring(NamedTuple):
    """How queries and keys become scores."""

    scale: float
    window: int | None
    """A query sees its own key and those before it, at most so many; None for all."""
    soft_cap: float | None


class QueryBlock(NamedTuple):
    """Queries from `first` to before `end`; they see no key before `seen`, nor from `end` on."""

    first: int
    end: int
    seen: int

    def own(self, x_XGSH: Array) -> Array:
        """Its queries' part: x_XQH."""
        part = x_XGSH[:, :, self.first : self.end]
        return part.reshape(part.shape[0], -1, part.shape[3])

    def visible(self, x_XTH: Array) -> Array:
        return x_XTH[:, self.seen : self.end]


def blocks(length: int, window: int | None) -> Iterator[QueryBlock]:
    """The blocks of a sequence, in order."""
    size = min(max(-(-length // MOST), SHORTEST), LONGEST)
    for first in range(0, length, size):
        seen = 0 if window is None else max(first - window + 1, 0)
        yield QueryBlock(first, min(first + size, length), seen)


def causal_attention(
    query_BSNH: Array,
    key_BSKH: Array,
    value_BSKH: Array,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Softmax of the scores that may be seen, times the values; sums are float32.

    Args:
        scale, window, soft_cap: as in `Scoring`.

    Returns:
        y_BSNH of query's type.
    """
    scoring = Scoring(scale, window, soft_cap)
    return _attention(scoring, *collectives.to_common_varying(query_BSNH, key_BSKH, value_BSKH))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(scoring: Scoring, query: Array, key: Array, value: Array) -> Array:
    return _forward(scoring, query, key, value)[0]


def _forward(
    scoring: Scoring, query: Array, key: Array, value: Array
) -> tuple[Array, tuple[Array, ...]]:
    query_XGSH, key_XTH, value_XTH = _queries(query, key), _keys(key), _keys(value)
    parts, logarithms = [], []
    for block in blocks(query.shape[1], scoring.window):
        scores_XQT, _ = _scores(scoring, block, query_XGSH, key_XTH)
        largest = scores_XQT.max(axis=-1, keepdims=True)
        weights = jnp.exp(scores_XQT - largest)
        total = weights.sum(axis=-1, keepdims=True)
        y_XQH = _dot(weights.astype(value.dtype), block.visible(value_XTH), 2, 1) / total
        parts.append(_by_group(query_XGSH, y_XQH))
        logarithms.append(largest + jnp.log(total))
    y = save_for_backward(_as_queries(query, jnp.concatenate(parts, axis=2)))
    logarithm = save_for_backward(jnp.concatenate(logarithms, axis=1))
    return y, (query, key, value, y, logarithm)


def _backward(
    scoring: Scoring, residuals: tuple[Array, ...], gradient: Array
) -> tuple[Array, Array, Array]:
    query, key, value, y, logarithm = residuals
    query_XGSH, key_XTH, value_XTH = _queries(query, key), _keys(key), _keys(value)
    gradient_XGSH, y_XGSH = _queries(gradient, key), _queries(y, key)
    query_parts, key_parts, value_parts, done = [], [], [], 0
    for block in blocks(query.shape[1], scoring.window):
        scores_XQT, slope = _scores(scoring, block, query_XGSH, key_XTH)
        own_XQH, dy_XQH = block.own(query_XGSH), block.own(gradient_XGSH)
        rows = own_XQH.shape[1]
        weights = jnp.exp(scores_XQT - logarithm[:, done : done + rows])
        done += rows
        dot = dy_XQH.astype(jnp.float32) * block.own(y_XGSH).astype(jnp.float32)
        by_weight = _dot(dy_XQH, block.visible(value_XTH), 2, 2) - dot.sum(axis=-1, keepdims=True)
        by_score = (weights * by_weight * slope).astype(query.dtype)
        query_parts.append(_by_group(query_XGSH, _dot(by_score, block.visible(key_XTH), 2, 1)))
        key_parts.append((block, opaque(_dot(transposed(own_XQH), by_score, 2, 1))))
        weights = weights.astype(query.dtype)
        value_parts.append((block, opaque(_dot(transposed(dy_XQH), weights, 2, 1))))
    return (
        _as_queries(query, jnp.concatenate(query_parts, axis=2)),
        _as_keys(key, key_parts),
        _as_keys(value, value_parts),
    )


_attention.defvjp(_forward, _backward)


def _scores(
    scoring: Scoring, block: QueryBlock, query_XGSH: Array, key_XTH: Array
) -> tuple[Array, Array | float]:
    """scores_XQT of a block, and their derivative by the bare products."""
    scores = _dot(block.own(query_XGSH), block.visible(key_XTH), 2, 2) * scoring.scale
    slope: Array | float = scoring.scale
    if scoring.soft_cap is not None:
        share = jnp.tanh(scores / scoring.soft_cap)
        scores, slope = scoring.soft_cap * share, scoring.scale * (1 - share * share)
    distance_ST = jnp.arange(block.first, block.end)[:, None] - jnp.arange(block.seen, block.end)
    is_seen = distance_ST >= 0
    if scoring.window is not None:
        is_seen &= distance_ST < scoring.window
    is_seen = jnp.tile(is_seen, (query_XGSH.shape[1], 1))
    return jnp.where(is_seen, scores, HIDDEN), slope


def _queries(x_BSNH: Array, key_BSKH: Array) -> Array:
    """x_XGSH."""
    batch, length, heads, width = x_BSNH.shape
    kv_heads = key_BSKH.shape[2]
    by_head = x_BSNH.reshape(batch, length, kv_heads, heads // kv_heads, width)
    return by_head.transpose(0, 2, 3, 1, 4).reshape(-1, heads // kv_heads, length, width)


def _as_queries(query_BSNH: Array, x_XGSH: Array) -> Array:
    """x in the order and type of the queries."""
    batch, length, heads, width = query_BSNH.shape
    x = x_XGSH.reshape(batch, heads, length, width).swapaxes(1, 2)
    return x.astype(query_BSNH.dtype)


def _keys(x_BSKH: Array) -> Array:
    """x_XTH."""
    batch, length, heads, width = x_BSKH.shape
    return x_BSKH.swapaxes(1, 2).reshape(batch * heads, length, width)


def _as_keys(key_BSKH: Array, parts: list[tuple[QueryBlock, Array]]) -> Array:
    """The sum of what blocks give for the keys they see, x_XHT each, in the order and type of the
    keys."""
    batch, length, heads, width = key_BSKH.shape
    room = [((0, 0), (0, 0), (block.seen, length - block.end)) for block, _ in parts]
    padded = [jnp.pad(x_XHT, wide) for (_, x_XHT), wide in zip(parts, room, strict=True)]
    x_XHT = functools.reduce(jnp.add, padded)
    x_BSKH = x_XHT.reshape(batch, heads, width, length).transpose(0, 3, 1, 2)
    return x_BSKH.astype(key_BSKH.dtype)


def _by_group(x_XGSH: Array, part_XQH: Array) -> Array:
    """A block's part with its heads apart: x_XGSH."""
    groups, width = x_XGSH.shape[1], x_XGSH.shape[3]
    return part_XQH.reshape(part_XQH.shape[0], groups, -1, width)


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    over = (((left_axis,), (right_axis,)), ((0,), (0,)))
    return jax.lax.dot_general(left, right, over, preferred_element_type=jnp.float32)

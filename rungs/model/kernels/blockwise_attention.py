"""Attention over full sequences, one block of queries at a time.

A block computes scores only for keys that one of its queries attends to, half of the square if
attention is causal; the full score matrix is never materialized. For the backward pass (Dao et al.
2022, "FlashAttention", section B.2) a CPU keeps the attention weights unless `remat` recomputes
them; other devices always recompute them. The plain form is `attention.plain_attention`.

Axes as in `gpt.py`, and
    X key heads of all sequences (B · K), G query heads per key head,
    Q queries of a block times the query heads per key head (G · the block's length)."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rungs.config.base import AUTO
from rungs.config.optimization_config import AttentionKernelOrAuto
from rungs.model.kernels.matmul import sum_over_last_axis, transpose_in_memory
from rungs.model.remat import checkpoint_marked, save_for_backward
from rungs.parallel import collectives, target_device

MIN_QUERIES, MAX_QUERIES = 64, 256
"""Queries in a block."""
PREFERRED_BLOCKS = 8
"""Blocks in a sequence, if that gives an allowed number of queries."""
MASKED_SCORE = -1e30
"""Finite, so that its difference from itself is 0."""


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["starts_BS", "sink_N"],
    meta_fields=["scale", "window", "soft_cap", "is_causal", "kernel"],
)
@dataclasses.dataclass(frozen=True)
class Scoring:
    """How causal attention scores queries and keys."""

    scale: float
    """Factor on the products of queries and keys."""
    window: int | None = None
    """Maximum number of keys, its own included, that a query attends to; None for all."""
    soft_cap: float | None = None
    """Bound on the absolute value of scores; None for no bound."""
    starts_BS: Array | None = None
    """Position of the first key that each query may attend to, at most its own; None for 0."""
    is_causal: bool = True
    """Whether queries attend to no later key. False: to all of their document; without window."""
    sink_N: Array | None = None
    """For each query head, the score of a sink: it takes a share of the attention weights, and has
    no value (GPT-OSS, arXiv 2508.10925, section 2.2). None for no sinks."""
    kernel: AttentionKernelOrAuto = AUTO
    """What computes it; see `attention.causal_kernel`."""

    @property
    def of_scores(self) -> tuple[float, float | None, Array | None]:
        """Scale, soft cap and sinks, the last arguments of `attention_weights`."""
        return self.scale, self.soft_cap, self.sink_N

    def is_seen(self, distance: Array) -> Array:
        """Return whether a query attends to a key `distance` tokens before it."""
        if not self.is_causal:
            return jnp.ones_like(distance, bool)
        seen = distance >= 0
        return seen if self.window is None else seen & (distance < self.window)

    def mask(self, length: int) -> Array:
        """Return mask_ST of full sequences or, with `starts_BS`, mask_B1ST."""
        mask = self.mask_of(QueryBlock(0, length, 0, length))
        return mask if self.starts_BS is None else mask[:, None]

    def mask_of(self, block: "QueryBlock") -> Array:
        """Return mask_ST of a block's queries and keys or, with `starts_BS`, mask_BST."""
        keys_T = jnp.arange(block.first_key, block.end_key)
        mask_ST = self.is_seen(jnp.arange(block.first, block.end)[:, None] - keys_T)
        if self.starts_BS is None:
            return mask_ST
        start_BS1 = self.starts_BS[:, block.first : block.end, None]
        if not self.is_causal:
            return start_BS1 == self.starts_BS[:, None, block.first_key : block.end_key]
        return mask_ST & (keys_T >= start_BS1)


class QueryBlock(NamedTuple):
    """Queries `first` to before `end`, which attend to keys `first_key` to before `end_key`."""

    first: int
    end: int
    first_key: int
    end_key: int

    def queries(self, x_XGSH: Array) -> Array:
        """Return x_XQH, the block's queries of x."""
        part = x_XGSH[:, :, self.first : self.end]
        return part.reshape(part.shape[0], -1, part.shape[3])

    def keys(self, x_XTH: Array) -> Array:
        """Return the keys of x that the block attends to."""
        return x_XTH[:, self.first_key : self.end_key]


def query_blocks(length: int, scoring: Scoring) -> Iterator[QueryBlock]:
    """Yield the blocks of a sequence, in order."""
    size = min(max(-(-length // PREFERRED_BLOCKS), MIN_QUERIES), MAX_QUERIES)
    for first in range(0, length, size):
        first_key = 0 if scoring.window is None else max(first - scoring.window + 1, 0)
        end = min(first + size, length)
        yield QueryBlock(first, end, first_key, end if scoring.is_causal else length)


def causal_attention(
    query_BSNH: Array, key_BSKH: Array, value_BSKH: Array, scoring: Scoring
) -> Array:
    """Return y_BSNH in the dtype of query; matmuls accumulate in float32. Values may have another
    width than keys."""
    attend = checkpoint_marked(_attention)
    inputs = query_BSNH, key_BSKH, value_BSKH, scoring.sink_N
    *arrays, sink_N = collectives.to_common_varying(*inputs)
    return attend(dataclasses.replace(scoring, sink_N=sink_N), *arrays)


class Weights(NamedTuple):
    """Attention weights of a block, in the form for the backward pass."""

    exponentials_XQT: Array
    """exp(score − the query's largest score), in the dtype of the values."""
    slope_XQT: Array | None
    """Derivative of the capped scores; None without a soft cap, as it is 1."""


class Residuals(NamedTuple):
    """Residuals for the backward pass; query, key, value and y as in `causal_attention`."""

    query: Array
    key: Array
    value: Array
    y: Array
    weights: list[Weights]
    """Weights of each block."""
    totals_XGS1: Array
    """Sum of each query's exponentials."""
    sinks_XGS1: Array | None
    """The sink's exponential in that sum."""


@jax.custom_vjp
def _attention(scoring: Scoring, query: Array, key: Array, value: Array) -> Array:
    return _forward(scoring, query, key, value)[0]


def _forward(
    scoring: Scoring, query: Array, key: Array, value: Array
) -> tuple[Array, tuple[Scoring, Residuals]]:
    query_XGSH, key_XTH, value_XTH = (
        grouped_queries(query, key),
        merged_keys(key),
        merged_keys(value),
    )
    parts, totals, weights, sinks = [], [], [], list[Array]()
    for block in query_blocks(query.shape[1], scoring):
        scores_XQT, slope_XQT = block_scores(scoring, block, query_XGSH, key_XTH)
        largest_XQ1 = scores_XQT.max(axis=-1, keepdims=True)
        if scoring.sink_N is not None:
            sink_XQ1 = _sinks_of(scoring.sink_N, query_XGSH, block)
            largest_XQ1 = jnp.maximum(largest_XQ1, sink_XQ1)
        shifted_XQT = scores_XQT - largest_XQ1
        exponentials_XQT = target_device.cpu_barrier(jnp.exp(shifted_XQT).astype(value.dtype))
        total_XQ1 = sum_over_last_axis(exponentials_XQT)
        if scoring.sink_N is not None:
            sinks.append(_by_group(query_XGSH, jnp.exp(sink_XQ1 - largest_XQ1)))
            total_XQ1 += sinks[-1].reshape(total_XQ1.shape)
        y_XQH = _dot(exponentials_XQT, block.keys(value_XTH), 2, 1)
        parts.append(_by_group(query_XGSH, y_XQH))
        totals.append(_by_group(query_XGSH, total_XQ1))
        weights.append(Weights(exponentials_XQT, slope_XQT))
    totals_XGS1 = save_for_backward(jnp.concatenate(totals, axis=2))
    y_XGSH = jnp.concatenate(parts, axis=2) / totals_XGS1
    y = save_for_backward(_as_queries(query, y_XGSH))
    sinks_XGS1 = save_for_backward(jnp.concatenate(sinks, axis=2)) if sinks else None
    return y, (scoring, Residuals(query, key, value, y, weights, totals_XGS1, sinks_XGS1))


def _backward(
    saved: tuple[Scoring, Residuals], gradient: Array
) -> tuple[Scoring | None, Array, Array, Array]:
    scoring, (query, key, value, y, weights, totals_XGS1, sinks_XGS1) = saved
    query_XGSH, key_XTH, value_XTH = (
        grouped_queries(query, key),
        merged_keys(key),
        merged_keys(value),
    )
    y_XGSH, dy_XGSH = (grouped_queries(a, key).astype(jnp.float32) for a in (y, gradient))
    # divided by the totals here, where there are fewer elements than weights
    dy_XGSH = (dy_XGSH / totals_XGS1).astype(query.dtype)
    query_parts, key_parts, value_parts = [], [], []
    blocks = query_blocks(query.shape[1], scoring)
    for block, (exponentials_XQT, slope_XQT) in zip(blocks, weights, strict=True):
        query_XQH, dy_XQH = block.queries(query_XGSH), block.queries(dy_XGSH)
        dy_times_y = dy_XQH.astype(jnp.float32) * block.queries(y_XGSH)
        weight_gradient = _dot(dy_XQH, block.keys(value_XTH), 2, 2) - dy_times_y.sum(
            axis=-1, keepdims=True
        )
        score_gradient = exponentials_XQT.astype(jnp.float32) * weight_gradient
        if slope_XQT is not None:
            score_gradient *= slope_XQT
        score_gradient = score_gradient.astype(query.dtype)
        query_parts.append(_by_group(query_XGSH, _dot(score_gradient, block.keys(key_XTH), 2, 1)))
        key_parts.append((block, _sum_over_queries(query_XQH, score_gradient)))
        value_parts.append((block, _sum_over_queries(dy_XQH, exponentials_XQT)))
    of_scoring: Scoring | None = None
    if sinks_XGS1 is not None:
        of_sink_X = -(sinks_XGS1 * dy_XGSH * y_XGSH).sum(axis=(2, 3))
        of_sink_N = of_sink_X.reshape(query.shape[0], -1).sum(axis=0)
        of_scoring = dataclasses.replace(scoring, starts_BS=None, sink_N=of_sink_N)
    return (
        of_scoring,
        _as_queries(query, jnp.concatenate(query_parts, axis=2) * scoring.scale),
        _as_keys(key, scoring.scale, key_parts),
        _as_keys(value, 1, value_parts),
    )


_attention.defvjp(_forward, _backward)


def block_scores(
    scoring: Scoring, block: QueryBlock, query_XGSH: Array, key_XTH: Array
) -> tuple[Array, Array | None]:
    """Return scores_XQT of a block and, with a soft cap, its derivative."""
    scores = _dot(block.queries(query_XGSH), block.keys(key_XTH), 2, 2) * scoring.scale
    slope: Array | None = None
    if scoring.soft_cap is not None:
        share = jnp.tanh(scores / scoring.soft_cap)
        scores, slope = scoring.soft_cap * share, 1 - share * share
    mask = scoring.mask_of(block)
    if scoring.starts_BS is not None:
        mask = jnp.repeat(mask, query_XGSH.shape[0] // len(mask), axis=0)
    mask = jnp.concatenate([mask] * query_XGSH.shape[1], axis=-2)
    return jnp.where(mask, scores, MASKED_SCORE), slope


def _sinks_of(sink_N: Array, query_XGSH: Array, block: QueryBlock) -> Array:
    """Return the sink of each query of a block, sink_XQ1."""
    rows, group = query_XGSH.shape[:2]
    sink_XG = jnp.tile(sink_N.astype(jnp.float32), rows * group // len(sink_N)).reshape(rows, group)
    shape = rows, group, block.end - block.first
    return jnp.broadcast_to(sink_XG[..., None], shape).reshape(rows, -1, 1)


def _sum_over_queries(x_XQH: Array, weights_XQT: Array) -> Array:
    """Return a block's products summed over its queries: x_XHT."""
    return target_device.cpu_barrier(_dot(transpose_in_memory(x_XQH), weights_XQT, 2, 1))


def grouped_queries(x_BSNH: Array, key_BSKH: Array) -> Array:
    """Return x_XGSH."""
    batch, length, heads, width = x_BSNH.shape
    kv_heads = key_BSKH.shape[2]
    by_head = x_BSNH.reshape(batch, length, kv_heads, heads // kv_heads, width)
    return by_head.transpose(0, 2, 3, 1, 4).reshape(-1, heads // kv_heads, length, width)


def _as_queries(query_BSNH: Array, x_XGSH: Array) -> Array:
    """Return x in the layout and dtype of the queries."""
    batch, length, heads, _ = query_BSNH.shape
    x = x_XGSH.reshape(batch, heads, length, -1).swapaxes(1, 2)
    return x.astype(query_BSNH.dtype)


def merged_keys(x_BSKH: Array) -> Array:
    """Return x_XTH."""
    batch, length, heads, width = x_BSKH.shape
    return x_BSKH.swapaxes(1, 2).reshape(batch * heads, length, width)


def _as_keys(key_BSKH: Array, scale: float, parts: list[tuple[QueryBlock, Array]]) -> Array:
    """Return the scaled sum of the blocks' gradients x_XHT in the layout and dtype of the keys."""
    batch, length, heads, width = key_BSKH.shape
    padding = [((0, 0), (0, 0), (block.first_key, length - block.end_key)) for block, _ in parts]
    padded = [jnp.pad(x_XHT, by) for (_, x_XHT), by in zip(parts, padding, strict=True)]
    x_XHT = functools.reduce(jnp.add, padded) * scale
    x_BSKH = x_XHT.reshape(batch, heads, width, length).transpose(0, 3, 1, 2)
    return x_BSKH.astype(key_BSKH.dtype)


def _by_group(x_XGSH: Array, part_XQH: Array) -> Array:
    """Return a block's part with an axis for its heads: x_XGSH."""
    rows, _, width = part_XQH.shape
    return part_XQH.reshape(rows, x_XGSH.shape[1], -1, width)


def _dot(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    contracted = (((left_axis,), (right_axis,)), ((0,), (0,)))
    return jax.lax.dot_general(left, right, contracted, preferred_element_type=jnp.float32)

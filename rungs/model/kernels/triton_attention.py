"""Causal attention over full sequences by Pallas kernels, on NVIDIA GPUs.

One kernel runs forward: a program has a tile of queries, loops over tiles of keys, and keeps the
running maximum and sum of the softmax. Two kernels run backward and recompute the attention weights
from the log-sum-exp: one for the gradient of queries, one for keys and values (Dao et al. 2022,
"FlashAttention"; Dao 2023, "FlashAttention-2", section 3.1). Tiles outside the causal mask, window
or document are skipped.

They cover what cuDNN, or JAX's interface to it, lacks: soft caps, heads of more than 128 elements,
float32, and separate documents. JAX deprecates this Triton backend since 0.11. On compute
capability 8 they stay as long as JAX has it, as nothing else has a backward pass there; on 9 and 10
until a GPU shows that `mosaic_attention` is right and not slower.

Axes as in `gpt.py`, and
    Q queries of a tile, T keys of a tile, G query heads that share a key head.
Scores are QT or, for the gradients of keys and values, TQ."""

import dataclasses
import functools
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from rungs.model.kernels.blockwise_attention import MASKED_SCORE, Scoring
from rungs.model.remat import save_for_backward
from rungs.parallel import collectives, target_device

MAX_HEAD_SIZE = 256


class Tiles(NamedTuple):
    """Queries and keys that a program has at once: powers of 2 from 16, as Triton requires."""

    queries: int
    keys: int


class Tiling(NamedTuple):
    """The tiles of each kernel."""

    forward: Tiles
    query_gradient: Tiles
    key_gradients: Tiles


_TILINGS = {
    (2, 128): Tiling(Tiles(128, 32), Tiles(128, 32), Tiles(32, 64)),
    (2, 256): Tiling(Tiles(64, 32), Tiles(64, 16), Tiles(16, 64)),
    (4, 64): Tiling(Tiles(128, 32), Tiles(128, 32), Tiles(32, 32)),
    (4, 128): Tiling(Tiles(64, 32), Tiles(64, 16), Tiles(32, 32)),
    (4, 256): Tiling(Tiles(32, 16), Tiles(32, 16), Tiles(16, 16)),
}
"""By bytes per element and head size; smaller heads use their dtype's first. Tiles are as large as
compilers for Ampere, Hopper and Blackwell allow without spilling registers or exceeding shared
memory, 99 KiB on some."""
_WARPS, _STAGES = 8, 2


class Documents(NamedTuple):
    """Where each token's document and the next one start, repeated per key head because all inputs
    of the kernels have heads."""

    starts_BSK: Array
    ends_BSK: Array

    @classmethod
    def of(cls, starts_BS: Array, kv_heads: int) -> Self:
        """Return consecutive documents with these starts."""
        length = starts_BS.shape[1]
        following_BS = jnp.pad(starts_BS[:, 1:], ((0, 0), (0, 1)), constant_values=length)
        is_last_BS = following_BS != starts_BS
        after_S = jnp.arange(1, length + 1)
        ends_BS = jax.lax.cummin(jnp.where(is_last_BS, after_S, length), axis=1, reverse=True)
        copies = [jnp.stack([array] * kv_heads, axis=2) for array in (starts_BS, ends_BS)]
        return cls(*copies)


def supports(query_BSNH: Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether the target device runs these kernels for such queries."""
    return query_BSNH.shape[-1] <= MAX_HEAD_SIZE and target_device.is_ampere_or_later()


def causal_attention(
    query_BSNH: Array, key_BSKH: Array, value_BSKH: Array, scoring: Scoring
) -> Array:
    """Like `blockwise_attention.causal_attention`."""
    starts_BS = scoring.starts_BS
    documents = None if starts_BS is None else Documents.of(starts_BS, key_BSKH.shape[2])
    inputs = query_BSNH, key_BSKH, value_BSKH, documents
    query, key, value, documents = collectives.to_common_varying(*inputs)
    own = dataclasses.replace(scoring, starts_BS=None)
    return pallas_attention(query, key, value, documents, own, interpret=False)


def pallas_attention(
    query_BSNH: Array,
    key_BSKH: Array,
    value_BSKH: Array,
    documents: Documents | None,
    scoring: Scoring,
    interpret: bool,
) -> Array:
    """Return y_BSNH in the dtype of query.

    Args:
        documents: None if each sequence is one document.
        scoring: without `starts_BS`.
        interpret: whether to run the kernels step by step, on any device."""
    sink_N, scoring = scoring.sink_N, dataclasses.replace(scoring, sink_N=None)
    y_BSNH, log_sum_BSN = _attention(
        query_BSNH, key_BSKH, value_BSKH, documents, scoring, interpret
    )
    if sink_N is None:
        return y_BSNH
    share_BSN = jax.nn.sigmoid(log_sum_BSN - sink_N)  # of all keys beside the sink
    return (share_BSN[..., None] * y_BSNH).astype(y_BSNH.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attention(
    query: Array,
    key: Array,
    value: Array,
    documents: Documents | None,
    scoring: Scoring,
    interpret: bool,
) -> tuple[Array, Array]:
    """Return y_BSNH, and the log-sum-exp of each query's scores."""
    return _forward(query, key, value, documents, scoring, interpret)[0]


def _forward(
    query: Array,
    key: Array,
    value: Array,
    documents: Documents | None,
    scoring: Scoring,
    interpret: bool,
) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
    like = jax.eval_shape(lambda x: (x, _sums_over_head(x)), query)
    tiles = _tiling(query).forward
    kernel = functools.partial(_attend, scoring, tiles)
    programs = _query_programs(tiles, query, key)
    arrays = query, key, value, *(documents or ())
    y, log_sum = map(save_for_backward, _run(kernel, programs, like, arrays, interpret))
    return (y, log_sum), (query, key, value, documents, y, log_sum)


def _backward(
    scoring: Scoring, interpret: bool, residuals: tuple[Any, ...], gradients: tuple[Array, Array]
) -> tuple[Array, Array, Array, None]:
    (query, key, value, documents, y, log_sum), (dy, of_log_sum) = residuals, gradients
    dy_times_y = _sums_over_head(dy.astype(jnp.float32) * y.astype(jnp.float32)) - of_log_sum
    arrays = query, key, value, dy, log_sum, dy_times_y, *(documents or ())
    like_query, *like_keys = jax.eval_shape(lambda *x: x, query, key, value)
    tiles = _tiling(query).query_gradient
    kernel = functools.partial(_query_gradient, scoring, tiles)
    programs = _query_programs(tiles, query, key)
    (query_gradient,) = _run(kernel, programs, (like_query,), arrays, interpret)
    tiles = _tiling(query).key_gradients
    kernel = functools.partial(_key_gradients, scoring, tiles)
    programs = pl.cdiv(key.shape[1], tiles.keys)
    key_gradient, value_gradient = _run(kernel, programs, like_keys, arrays, interpret)
    return query_gradient, key_gradient, value_gradient, None


_attention.defvjp(_forward, _backward)


class _RunningSoftmax(NamedTuple):
    """Softmax-weighted sum of values over the keys so far."""

    largest_Q: Array
    total_Q: Array
    """Sum of exp(score − largest score)."""
    y_QH: Array
    """Not yet divided by `total_Q`."""

    @classmethod
    def of_no_keys(cls, query_QH: Array) -> Self:
        y_QH = jnp.zeros(query_QH.shape, jnp.float32)
        return cls(jnp.full(len(y_QH), MASKED_SCORE), jnp.zeros(len(y_QH)), y_QH)

    def add(self, scores_QT: Array, value_TH: Array) -> Self:
        largest_Q = jnp.maximum(self.largest_Q, scores_QT.max(axis=1))
        weights_QT = jnp.exp(scores_QT - largest_Q[:, None])
        decay_Q = jnp.exp(self.largest_Q - largest_Q)
        total_Q = self.total_Q * decay_Q + weights_QT.sum(axis=1)
        part_QH = triton.dot(weights_QT.astype(value_TH.dtype), value_TH)
        return type(self)(largest_Q, total_Q, self.y_QH * decay_Q[:, None] + part_QH)


def _attend(scoring: Scoring, tiles: Tiles, *refs: Any) -> None:
    """Write y and the log-sum-exp of a tile of queries."""
    query, key, value, *documents, y, log_sum = refs
    own = _QueryTile.of_program(tiles, query, *documents)
    query_QH = _load(query, own.at_Q, own.head)

    def add(number: Array, softmax: _RunningSoftmax) -> _RunningSoftmax:
        at_T = _range(number, tiles.keys)
        products_QT = triton.dot(query_QH, _load(key, at_T), trans_b=True)
        scores_QT, _ = _scores(scoring, products_QT, own.seen(scoring, at_T))
        return softmax.add(scores_QT, _load(value, at_T))

    softmax = own.over_keys(scoring, tiles, add, _RunningSoftmax.of_no_keys(query_QH))
    _store(y, own.at_Q, own.head, softmax.y_QH / softmax.total_Q[:, None])
    _store(log_sum, own.at_Q, own.head, softmax.largest_Q + jnp.log(softmax.total_Q))


def _query_gradient(scoring: Scoring, tiles: Tiles, *refs: Any) -> None:
    """Write the gradient of a tile of queries."""
    query, key, value, dy, log_sum, dy_times_y, *documents, gradient = refs
    own = _QueryTile.of_program(tiles, query, *documents)
    query_QH, dy_QH, log_sum_Q, dy_times_y_Q = (
        _load(ref, own.at_Q, own.head) for ref in (query, dy, log_sum, dy_times_y)
    )

    def add(number: Array, total_QH: Array) -> Array:
        at_T = _range(number, tiles.keys)
        key_TH = _load(key, at_T)
        products_QT = triton.dot(query_QH, key_TH, trans_b=True)
        scores_QT, slope = _scores(scoring, products_QT, own.seen(scoring, at_T))
        weights_QT = jnp.exp(scores_QT - log_sum_Q[:, None])
        weight_gradient_QT = triton.dot(dy_QH, _load(value, at_T), trans_b=True)
        score_gradient_QT = weights_QT * (weight_gradient_QT - dy_times_y_Q[:, None]) * slope
        return total_QH + triton.dot(score_gradient_QT.astype(key_TH.dtype), key_TH)

    zeros_QH = jnp.zeros(query_QH.shape, jnp.float32)
    _store(gradient, own.at_Q, own.head, own.over_keys(scoring, tiles, add, zeros_QH))


def _key_gradients(scoring: Scoring, tiles: Tiles, *refs: Any) -> None:
    """Write the gradients of a tile of keys and of their values, summed over query heads."""
    query, key, value, dy, log_sum, dy_times_y, *documents, key_gradient, value_gradient = refs
    at_T = _range(pl.program_id(0), tiles.keys)
    key_TH, value_TH = _load(key, at_T), _load(value, at_T)
    length, group = query.shape[:2]
    first, end = _query_tiles(scoring, tiles, length, *documents)

    def add(number: Array, totals: tuple[Array, Array]) -> tuple[Array, Array]:
        tile, head = _tile_and_head(number, group)
        at_Q = _range(first + tile, tiles.queries)
        query_QH, dy_QH, log_sum_Q, dy_times_y_Q = (
            _load(ref, at_Q, head) for ref in (query, dy, log_sum, dy_times_y)
        )
        products_TQ = triton.dot(key_TH, query_QH, trans_b=True)
        seen_TQ = scoring.is_seen(at_Q[None, :] - at_T[:, None])
        if documents:
            seen_TQ &= at_T[:, None] >= _load(documents[0], at_Q)[None, :]
        scores_TQ, slope = _scores(scoring, products_TQ, seen_TQ)
        weights_TQ = jnp.exp(scores_TQ - log_sum_Q[None, :])
        weight_gradient_TQ = triton.dot(value_TH, dy_QH, trans_b=True)
        score_gradient_TQ = weights_TQ * (weight_gradient_TQ - dy_times_y_Q[None, :]) * slope
        return (
            totals[0] + triton.dot(score_gradient_TQ.astype(query_QH.dtype), query_QH),
            totals[1] + triton.dot(weights_TQ.astype(dy_QH.dtype), dy_QH),
        )

    zeros_TH = jnp.zeros(key_TH.shape, jnp.float32)
    of_keys, of_values = jax.lax.fori_loop(0, (end - first) * group, add, (zeros_TH, zeros_TH))
    _store(key_gradient, at_T, 0, of_keys)
    _store(value_gradient, at_T, 0, of_values)


class _QueryTile(NamedTuple):
    """The queries of a program."""

    head: Array
    """Index among the query heads that share a key head."""
    first: Array
    end: Array
    """Position after the last query."""
    at_Q: Array
    first_key_Q: Array | None
    """Start of each query's document, if documents are separate."""
    first_key: Array | int
    """Minimum of `first_key_Q`."""

    @classmethod
    def of_program(cls, tiles: Tiles, query: Any, starts: Any = None, _: Any = None) -> Self:
        """Return the tile for the refs that `_run` passes. Tiles with the most keys start first, so
        that no program runs alone at the end."""
        length, group, _ = query.shape
        tile, head = _tile_and_head(pl.num_programs(0) - 1 - pl.program_id(0), group)
        first = tile * tiles.queries
        end = jnp.minimum(first + tiles.queries, length)
        at_Q = _range(tile, tiles.queries)
        if starts is None:
            return cls(head, first, end, at_Q, None, 0)
        return cls(head, first, end, at_Q, _load(starts, at_Q), _load_one(starts, first))

    def seen(self, scoring: Scoring, at_T: Array) -> Array:
        """Return seen_QT, true where a query attends to a key."""
        seen_QT = scoring.is_seen(self.at_Q[:, None] - at_T[None, :])
        if self.first_key_Q is None:
            return seen_QT
        return seen_QT & (at_T[None, :] >= self.first_key_Q[:, None])

    def over_keys(self, scoring: Scoring, tiles: Tiles, add: Any, init: Any) -> Any:
        """Fold `add`, from `init`, over the indices of key tiles that a query attends to."""
        window = self.end if scoring.window is None else scoring.window
        first_key = jnp.maximum(self.first - window + 1, self.first_key)
        numbers = first_key // tiles.keys, pl.cdiv(self.end, tiles.keys)
        return jax.lax.fori_loop(*numbers, add, init)


def _query_tiles(
    scoring: Scoring, tiles: Tiles, length: int, _: Any = None, ends: Any = None
) -> tuple[Array, Array]:
    """Return the range, first and end, of query tiles that attend to the program's keys."""
    first_key = pl.program_id(0) * tiles.keys
    window = length if scoring.window is None else scoring.window
    end = jnp.minimum(first_key + tiles.keys + window - 1, length)
    if ends is not None:
        last_key = jnp.minimum(first_key + tiles.keys, length) - 1
        end = jnp.minimum(end, _load_one(ends, last_key))
    return first_key // tiles.queries, pl.cdiv(end, tiles.queries)


def _tile_and_head(number: Array, group: int) -> tuple[Array, Array]:
    """Return the indices of a tile and of a head among those that share a key head."""
    tile = number // group
    return tile, number - tile * group


def _scores(scoring: Scoring, products: Array, seen: Array) -> tuple[Array, Array]:
    """Return scores, and their derivative with respect to the products query · key; `seen` is
    whether the query attends to the key."""
    scores, slope = products * scoring.scale, jnp.asarray(scoring.scale)
    if scoring.soft_cap is not None:
        share = jnp.tanh(products * (scoring.scale / scoring.soft_cap))
        scores, slope = scoring.soft_cap * share, scoring.scale * (1 - share * share)
    return jnp.where(seen, scores, MASKED_SCORE), slope


def _sums_over_head(x_BSNH: Array) -> Array:
    """Return x_BSN in float32."""
    return x_BSNH.sum(axis=-1, dtype=jnp.float32)


def _tiling(query_BSNH: Array) -> Tiling:
    size = query_BSNH.dtype.itemsize
    return _TILINGS[size, max(pl.next_power_of_2(query_BSNH.shape[-1]), 256 // size)]


def _query_programs(tiles: Tiles, query_BSNH: Array, key_BSKH: Array) -> int:
    """Return the number of query programs per key head."""
    group = query_BSNH.shape[2] // key_BSKH.shape[2]
    return group * pl.cdiv(query_BSNH.shape[1], tiles.queries)


def _run(kernel: Any, programs: int, like: Any, arrays: tuple[Array, ...], interpret: bool) -> Any:
    """Return the outputs of a kernel. Its refs are of one sequence and the heads that share a key
    head: SGH, or SG for sums over heads. G is 1 for keys and values."""
    batch, length, kv_heads, _ = arrays[1].shape

    def block(x: Any) -> pl.BlockSpec:
        shape = None, length, x.shape[2] // kv_heads, *x.shape[3:]
        return pl.BlockSpec(shape, lambda _, k, b: (b, 0, k, 0)[: len(shape)])

    call = pl.pallas_call(
        kernel,
        like,
        grid=(programs, kv_heads, batch),
        in_specs=[block(x) for x in arrays],
        out_specs=[block(x) for x in like],
        interpret=interpret,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
    )
    return jax.jit(call)(*arrays)  # else JAX recomputes calls whose results "dots" has saved


def _range(tile: Any, size: int) -> Array:
    return tile * size + jnp.arange(size)


def _load(ref: Any, at: Array, head: Any = 0) -> Array:
    where, mask = _elements(ref, at, head)
    return triton.load(where, mask=mask, other=0)


def _load_one(ref: Any, at: Array) -> Array:
    """Return the first head's element at a position."""
    return triton.load(ref.at[at, jnp.int32(0)])


def _store(ref: Any, at: Array, head: Any, x: Array) -> None:
    where, mask = _elements(ref, at, head)
    triton.store(where, x.astype(ref.dtype), mask=mask)


def _elements(ref: Any, at: Array, head: Any) -> tuple[Any, Array]:
    """Return a head's elements at these positions, padded to a power of 2, and which exist."""
    length, _, *width = ref.shape
    if not width:
        return ref.at[at, head], at < length
    column = jnp.arange(max(pl.next_power_of_2(*width), 16))
    mask = (at < length)[:, None] & (column < width[0])[None, :]
    return ref.at[at[:, None], head, column[None, :]], mask

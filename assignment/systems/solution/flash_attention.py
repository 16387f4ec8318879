"""Attention that never has all scores at once, as a kernel. Task:
`assignment/systems/tasks/flash_attention.md`.

S positions, H width of a head, Q queries of a block, K keys of a block. One sequence and one head;
`jax.vmap` adds others. Position i attends to positions 0 … i, and scores are divided by √H.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


class Running(NamedTuple):
    """What a block of queries remembers of the keys that it has seen so far, in float32."""

    largest_Q: jax.Array
    """The largest score; -∞ before the first key."""
    total_Q: jax.Array
    """Σ exp(score - largest)."""
    output_QH: jax.Array
    """Σ exp(score - largest) · value."""


def merge(seen: Running, scores_QK: jax.Array, values_KH: jax.Array) -> Running:
    """Return what is known after a further block of keys. A score of -∞ is a key that the query
    doesn't attend to; a query may have no other."""
    largest_Q = jnp.maximum(seen.largest_Q, scores_QK.max(axis=1))
    finite_Q = jnp.where(largest_Q == -jnp.inf, 0, largest_Q)
    weights_QK = jnp.exp(scores_QK - finite_Q[:, None])
    shrink_Q = jnp.exp(seen.largest_Q - finite_Q)
    return Running(
        largest_Q,
        seen.total_Q * shrink_Q + weights_QK.sum(axis=1),
        seen.output_QH * shrink_Q[:, None] + weights_QK @ values_KH,
    )


def kernel(query_ref: Any, key_ref: Any, value_ref: Any, output_ref: Any, log_sum_ref: Any) -> None:
    """Write the output and the logarithm of Σ exp(score) of one block of queries.

    Args:
        query_ref: (Q, H), the block `pl.program_id(0)`.
        key_ref, value_ref: (S, H), all of them, to be read in blocks of Q. Blocks of which the
            queries may not see any are not read.
        output_ref: (Q, H), in the dtype of the values.
        log_sum_ref: (Q,), in float32.
    """
    size, width = query_ref.shape
    own = pl.program_id(0)
    query_QH = query_ref[...].astype(jnp.float32) / math.sqrt(width)

    def attend(block: jax.Array, seen: Running) -> Running:
        keys = pl.ds(block * size, size)
        scores_QK = query_QH @ key_ref[keys, :].astype(jnp.float32).T
        position = jnp.arange(size)
        is_seen_QK = (own * size + position)[:, None] >= block * size + position
        scores_QK = jnp.where(is_seen_QK, scores_QK, -jnp.inf)
        return merge(seen, scores_QK, value_ref[keys, :].astype(jnp.float32))

    nothing = Running(jnp.full(size, -jnp.inf), jnp.zeros(size), jnp.zeros((size, width)))
    seen = jax.lax.fori_loop(0, own + 1, attend, nothing)
    output_ref[...] = (seen.output_QH / seen.total_Q[:, None]).astype(output_ref.dtype)
    log_sum_ref[...] = seen.largest_Q + jnp.log(seen.total_Q)


def forward(
    query_SH: jax.Array, key_SH: jax.Array, value_SH: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the output (S, H) and the logarithm of Σ exp(score), (S,): `kernel` for each block of
    queries. S is a multiple of `block_size`."""
    length, width = query_SH.shape
    own_rows = pl.BlockSpec((block_size, width), lambda block: (block, 0))
    all_rows = pl.BlockSpec((length, width), lambda _: (0, 0))
    return pl.pallas_call(
        kernel,
        grid=(length // block_size,),
        in_specs=[own_rows, all_rows, all_rows],
        out_specs=[own_rows, pl.BlockSpec((block_size,), lambda block: (block,))],
        out_shape=[
            jax.ShapeDtypeStruct((length, width), value_SH.dtype),
            jax.ShapeDtypeStruct((length,), jnp.float32),
        ],
        interpret=jax.default_backend() == "cpu",
    )(query_SH, key_SH, value_SH)


def backward(
    query_SH: jax.Array,
    key_SH: jax.Array,
    value_SH: jax.Array,
    output_SH: jax.Array,
    log_sum_S: jax.Array,
    gradient_SH: jax.Array,
    block_size: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of query, key and value, in their dtype. Weights are computed again,
    from `log_sum_S`, for one block of keys at a time; no kernel is needed.

    Args:
        output_SH, log_sum_S: what `forward` returned.
        gradient_SH: of the output.
    """
    dtype, (length, width) = query_SH.dtype, query_SH.shape
    query_SH, key_SH, value_SH, output_SH, gradient_SH = (
        each.astype(jnp.float32) for each in (query_SH, key_SH, value_SH, output_SH, gradient_SH)
    )
    scale = 1 / math.sqrt(width)
    position = jnp.arange(length)
    of_softmax_S = (gradient_SH * output_SH).sum(axis=1)

    def of_keys(
        query_gradient_SH: jax.Array, block: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        keys_KH, values_KH, positions_K = block
        scores_SK = query_SH @ keys_KH.T * scale
        is_seen_SK = position[:, None] >= positions_K
        weights_SK = jnp.where(is_seen_SK, jnp.exp(scores_SK - log_sum_S[:, None]), 0)
        of_weights_SK = gradient_SH @ values_KH.T
        of_scores_SK = weights_SK * (of_weights_SK - of_softmax_S[:, None]) * scale
        of_keys_KH, of_values_KH = of_scores_SK.T @ query_SH, weights_SK.T @ gradient_SH
        return query_gradient_SH + of_scores_SK @ keys_KH, (of_keys_KH, of_values_KH)

    blocks = jax.tree.map(
        lambda a: a.reshape(-1, block_size, *a.shape[1:]), (key_SH, value_SH, position)
    )
    of_query_SH, others = jax.lax.scan(of_keys, jnp.zeros_like(query_SH), blocks)
    of_query_SH, of_key_SH, of_value_SH = (
        each.reshape(length, width).astype(dtype) for each in (of_query_SH, *others)
    )
    return of_query_SH, of_key_SH, of_value_SH


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def attention(
    query_SH: jax.Array, key_SH: jax.Array, value_SH: jax.Array, block_size: int
) -> jax.Array:
    """Return the output of `forward`, with the gradients of `backward`."""
    return forward(query_SH, key_SH, value_SH, block_size)[0]


def _remember(
    query_SH: jax.Array, key_SH: jax.Array, value_SH: jax.Array, block_size: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    output_SH, log_sum_S = forward(query_SH, key_SH, value_SH, block_size)
    return output_SH, (query_SH, key_SH, value_SH, output_SH, log_sum_S)


def _gradients(
    block_size: int, remembered: tuple[jax.Array, ...], gradient_SH: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    query_SH, key_SH, value_SH, output_SH, log_sum_S = remembered
    return backward(query_SH, key_SH, value_SH, output_SH, log_sum_S, gradient_SH, block_size)


attention.defvjp(_remember, _gradients)

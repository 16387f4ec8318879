"""Attention that never has all scores at once, as a kernel. Task:
`assignment/systems/tasks/flash_attention.md`.

S positions, H width of a head, Q queries of a block, K keys of a block. One sequence and one head;
`jax.vmap` adds others. Position i attends to positions 0 … i, and scores are divided by √H.
"""

from typing import Any, NamedTuple

import jax


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
    raise NotImplementedError("merge: see assignment/systems/tasks/flash_attention.md")


def kernel(query_ref: Any, key_ref: Any, value_ref: Any, output_ref: Any, log_sum_ref: Any) -> None:
    """Write the output and the logarithm of Σ exp(score) of one block of queries.

    Args:
        query_ref: (Q, H), the block `pl.program_id(0)`.
        key_ref, value_ref: (S, H), all of them, to be read in blocks of Q. Blocks of which the
            queries may not see any are not read.
        output_ref: (Q, H), in the dtype of the values.
        log_sum_ref: (Q,), in float32.
    """
    raise NotImplementedError("kernel: see assignment/systems/tasks/flash_attention.md")


def forward(
    query_SH: jax.Array, key_SH: jax.Array, value_SH: jax.Array, block_size: int
) -> tuple[jax.Array, jax.Array]:
    """Return the output (S, H) and the logarithm of Σ exp(score), (S,): `kernel` for each block of
    queries. S is a multiple of `block_size`."""
    raise NotImplementedError("forward: see assignment/systems/tasks/flash_attention.md")


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
    raise NotImplementedError("backward: see assignment/systems/tasks/flash_attention.md")


def attention(
    query_SH: jax.Array, key_SH: jax.Array, value_SH: jax.Array, block_size: int
) -> jax.Array:
    """Return the output of `forward`, with the gradients of `backward`."""
    raise NotImplementedError("attention: see assignment/systems/tasks/flash_attention.md")

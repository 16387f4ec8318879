"""Activation checkpointing: compute activations again instead of keeping them. Task:
`assignment/systems/tasks/remat.md`.

Axes as in `given.py`. The weights of a stack are "up" (L, D, F) and "down" (L, F, D). Loops over
layers are `jax.lax.scan`s.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ..given import Params, layer


def temporary_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the bytes that a function needs beside its arguments and its results, as the compiler
    counts them. Nothing is computed.

    Args:
        arguments: arrays, or `jax.ShapeDtypeStruct`s, which only say how large they are.
    """
    analysis: Any = jax.jit(function).lower(*arguments).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def each_layer_again(weights: Params, x_BD: jax.Array) -> jax.Array:
    """Return x after all layers. For the backward pass only the input of every layer is kept."""

    @jax.checkpoint
    def again(x_BD: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        return layer(weights, x_BD), None

    return jax.lax.scan(again, x_BD, weights)[0]


def segments_again(weights: Params, x_BD: jax.Array, segments: int) -> jax.Array:
    """Return x after all layers. For the backward pass only the input of every segment is kept, L /
    segments layers long, and then that of every layer of the segment whose turn it is."""
    parts = jax.tree.map(lambda w: w.reshape(segments, -1, *w.shape[1:]), weights)

    @jax.checkpoint
    def again(x_BD: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        return each_layer_again(weights, x_BD), None

    return jax.lax.scan(again, x_BD, parts)[0]


def matmuls_kept(weights: Params, x_BD: jax.Array) -> jax.Array:
    """Return x after all layers. For the backward pass the input of every layer is kept, and x_BD @
    up. What is computed again is cheap: it has no matmul."""

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    def again(x_BD: jax.Array, weights: Params) -> tuple[jax.Array, None]:
        return layer(weights, x_BD), None

    return jax.lax.scan(again, x_BD, weights)[0]

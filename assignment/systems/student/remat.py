"""Activation checkpointing: compute activations again instead of keeping them. Task:
`assignment/systems/tasks/remat.md`.

Axes as in `given.py`. The weights of a stack are "up" (L, D, F) and "down" (L, F, D). Loops over
layers are `jax.lax.scan`s.
"""

from collections.abc import Callable
from typing import Any

import jax

from ..given import Params


def temporary_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Return the bytes that a function needs beside its arguments and its results, as the compiler
    counts them. Nothing is computed.

    Args:
        arguments: arrays, or `jax.ShapeDtypeStruct`s, which only say how large they are.
    """
    raise NotImplementedError("temporary_bytes: see assignment/systems/tasks/remat.md")


def each_layer_again(weights: Params, x_BD: jax.Array) -> jax.Array:
    """Return x after all layers. For the backward pass only the input of every layer is kept."""
    raise NotImplementedError("each_layer_again: see assignment/systems/tasks/remat.md")


def segments_again(weights: Params, x_BD: jax.Array, segments: int) -> jax.Array:
    """Return x after all layers. For the backward pass only the input of every segment is kept, L /
    segments layers long, and then that of every layer of the segment whose turn it is."""
    raise NotImplementedError("segments_again: see assignment/systems/tasks/remat.md")


def matmuls_kept(weights: Params, x_BD: jax.Array) -> jax.Array:
    """Return x after all layers. For the backward pass the input of every layer is kept, and x_BD @
    up. What is computed again is cheap: it has no matmul."""
    raise NotImplementedError("matmuls_kept: see assignment/systems/tasks/remat.md")

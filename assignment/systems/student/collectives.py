"""All-reduce, made of reduce-scatter and all-gather, and an optimizer whose state is split. Task:
`assignment/systems/tasks/collectives.md`.

The functions of an array run on each of N devices along the axis DATA, inside `jax.shard_map`.
"""

import jax
from jax.sharding import Mesh

from .data_parallel import Loss, Step


def reduce_scatter(x: jax.Array) -> jax.Array:
    """Return a part of the sum of all devices' x: of N equal parts along the first axis, device i
    gets part i.

    N - 1 times, every device sends one part to the next one in a ring.
    """
    raise NotImplementedError("reduce_scatter: see assignment/systems/tasks/collectives.md")


def all_gather(part: jax.Array) -> jax.Array:
    """Return the parts of all devices, one after the other along the first axis.

    N - 1 times, every device sends one part to the next one in a ring.
    """
    raise NotImplementedError("all_gather: see assignment/systems/tasks/collectives.md")


def all_reduce(x: jax.Array) -> jax.Array:
    """Return the sum of all devices' x, on every device. The first axis has a multiple of N."""
    raise NotImplementedError("all_reduce: see assignment/systems/tasks/collectives.md")


def bytes_sent(collective: str, array_bytes: int, devices: int) -> float:
    """Return the bytes that each device sends in a ring.

    Args:
        collective: "reduce-scatter", "all-gather" or "all-reduce".
        array_bytes: of the whole array, not of a part.
    """
    raise NotImplementedError("bytes_sent: see assignment/systems/tasks/collectives.md")


def make_zero_step(loss: Loss, mesh: Mesh) -> Step:
    """Return a compiled step in which every device has all weights, but only its part of the
    moments, and updates only its part of the weights (ZeRO, stage 1). It sends as much as
    `make_data_parallel_step`, in other collectives.

    Moments are split along the first axis of each array; N divides it.
    """
    raise NotImplementedError("make_zero_step: see assignment/systems/tasks/collectives.md")

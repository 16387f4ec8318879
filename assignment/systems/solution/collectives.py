"""All-reduce, made of reduce-scatter and all-gather, and an optimizer whose state is split. Task:
`assignment/systems/tasks/collectives.md`.

The functions of an array run on each of N devices along the axis DATA, inside `jax.shard_map`.
"""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ..given import DATA, Batch, Params, sgd
from .data_parallel import Loss, Step, local_gradients


def reduce_scatter(x: jax.Array) -> jax.Array:
    """Return a part of the sum of all devices' x: of N equal parts along the first axis, device i
    gets part i.

    N - 1 times, every device sends one part to the next one in a ring.
    """
    devices, own = jax.lax.axis_size(DATA), jax.lax.axis_index(DATA)
    parts = x.reshape(devices, -1, *x.shape[1:])
    total = parts[(own - 1) % devices]
    for hop in range(2, devices + 1):
        total = _to_next(total) + parts[(own - hop) % devices]
    return total


def all_gather(part: jax.Array) -> jax.Array:
    """Return the parts of all devices, one after the other along the first axis.

    N - 1 times, every device sends one part to the next one in a ring.
    """
    devices, own = jax.lax.axis_size(DATA), jax.lax.axis_index(DATA)
    parts = jnp.zeros((devices, *part.shape), part.dtype).at[own].set(part)
    for hop in range(1, devices):
        part = _to_next(part)
        parts = parts.at[(own - hop) % devices].set(part)
    return parts.reshape(-1, *part.shape[1:])


def all_reduce(x: jax.Array) -> jax.Array:
    """Return the sum of all devices' x, on every device. The first axis has a multiple of N."""
    return all_gather(reduce_scatter(x))


def bytes_sent(collective: str, array_bytes: int, devices: int) -> float:
    """Return the bytes that each device sends in a ring.

    Args:
        collective: "reduce-scatter", "all-gather" or "all-reduce".
        array_bytes: of the whole array, not of a part.
    """
    rounds = {"reduce-scatter": 1, "all-gather": 1, "all-reduce": 2}[collective]
    return rounds * array_bytes * (devices - 1) / devices


def make_zero_step(loss: Loss, mesh: Mesh) -> Step:
    """Return a compiled step in which every device has all weights, but only its part of the
    moments, and updates only its part of the weights (ZeRO, stage 1). It sends as much as
    `make_data_parallel_step`, in other collectives.

    Moments are split along the first axis of each array; N divides it.
    """

    def on_each_device(
        params: Params, moments: Params, batch: Batch
    ) -> tuple[Params, Params, jax.Array]:
        value, gradients = local_gradients(loss, params, batch)
        value, count = jax.lax.psum((value, batch.counted_B.sum()), DATA)
        gradients = jax.tree.map(lambda g: reduce_scatter(g) / count, gradients)
        params, moments = sgd(jax.tree.map(_own_part, params), moments, gradients)
        return jax.tree.map(all_gather, params), moments, value / count

    everywhere, split = PartitionSpec(), PartitionSpec(DATA)
    return jax.jit(
        jax.shard_map(
            on_each_device,
            mesh=mesh,
            in_specs=(everywhere, split, split),
            out_specs=(everywhere, split, everywhere),
            check_vma=False,  # that gathered weights are the same everywhere, JAX can't see
        )
    )


def _to_next(x: jax.Array) -> jax.Array:
    devices = jax.lax.axis_size(DATA)
    return jax.lax.ppermute(x, DATA, [(i, (i + 1) % devices) for i in range(devices)])


def _own_part(x: jax.Array) -> jax.Array:
    return x.reshape(jax.lax.axis_size(DATA), -1, *x.shape[1:])[jax.lax.axis_index(DATA)]

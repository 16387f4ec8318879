"""A training step on several devices, with the collectives written out. Task:
`assignment/systems/tasks/data_parallel.md`.

Axes as in `given.py`. `Loss` is a function like `given.summed_loss`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from ..given import DATA, Batch, Params, sgd

Loss = Callable[[Params, Batch], jax.Array]
Step = Callable[[Params, Params, Batch], tuple[Params, Params, jax.Array]]
"""From weights, moments and a batch to new weights, new moments and the loss before the update."""


def local_gradients(loss: Loss, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
    """Return the summed loss of this device's rows, and its gradients, without communication.

    Args:
        params: the same on all devices along DATA.
        batch: this device's rows.
    """
    return jax.value_and_grad(loss)(jax.lax.pcast(params, DATA, to="varying"), batch)


def accumulated_gradients(
    loss: Loss, params: Params, batch: Batch, microbatches: int
) -> tuple[jax.Array, Params]:
    """Return what `local_gradients` does, from so many equal parts of the batch, one after the
    other, and still without communication. Needs the memory of one part's activations."""
    parts = jax.tree.map(lambda a: a.reshape(microbatches, -1, *a.shape[1:]), batch)

    def add(total: tuple[jax.Array, Params], part: Batch) -> tuple[tuple[jax.Array, Params], None]:
        return jax.tree.map(jnp.add, total, local_gradients(loss, params, part)), None

    first, rest = (jax.tree.map(lambda a, i=i: a[i], parts) for i in (0, slice(1, None)))
    return jax.lax.scan(add, local_gradients(loss, params, first), rest)[0]


def all_reduce_mean(
    summed: tuple[jax.Array, Params], counted_B: jax.Array
) -> tuple[jax.Array, Params]:
    """Return the loss and the gradients of the mean over all rows that count, of all devices.

    Args:
        summed: this device's sums, as from `local_gradients`.
        counted_B: which of this device's rows count. Other devices may have more of them or fewer.
    """
    total, count = jax.lax.psum((summed, counted_B.sum()), DATA)
    return jax.tree.map(lambda a: a / count, total)


def make_data_parallel_step(loss: Loss, mesh: Mesh, microbatches: int = 1) -> Step:
    """Return a compiled step in which every device has all weights and moments, and its part of
    the batch. Gradients are sent once, after the last microbatch.

    Args:
        mesh: with the axis DATA.
    """

    def on_each_device(
        params: Params, moments: Params, batch: Batch
    ) -> tuple[Params, Params, jax.Array]:
        summed = accumulated_gradients(loss, params, batch, microbatches)
        value, gradients = all_reduce_mean(summed, batch.counted_B)
        return *sgd(params, moments, gradients), value

    everywhere, rows = PartitionSpec(), PartitionSpec(DATA)
    specs = (everywhere, everywhere, rows)
    return jax.jit(jax.shard_map(on_each_device, mesh=mesh, in_specs=specs, out_specs=everywhere))

"""A training step on several devices, with the collectives written out. Task:
`assignment/systems/tasks/data_parallel.md`.

Axes as in `given.py`. `Loss` is a function like `given.summed_loss`.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from ..given import Batch, Params

Loss = Callable[[Params, Batch], jax.Array]
Step = Callable[[Params, Params, Batch], tuple[Params, Params, jax.Array]]
"""From weights, moments and a batch to new weights, new moments and the loss before the update."""


def local_gradients(loss: Loss, params: Params, batch: Batch) -> tuple[jax.Array, Params]:
    """Return the summed loss of this device's rows, and its gradients, without communication.

    Args:
        params: the same on all devices along DATA.
        batch: this device's rows.
    """
    raise NotImplementedError("local_gradients: see assignment/systems/tasks/data_parallel.md")


def accumulated_gradients(
    loss: Loss, params: Params, batch: Batch, microbatches: int
) -> tuple[jax.Array, Params]:
    """Return what `local_gradients` does, from so many equal parts of the batch, one after the
    other, and still without communication. Needs the memory of one part's activations."""
    raise NotImplementedError(
        "accumulated_gradients: see assignment/systems/tasks/data_parallel.md"
    )


def all_reduce_mean(
    summed: tuple[jax.Array, Params], counted_B: jax.Array
) -> tuple[jax.Array, Params]:
    """Return the loss and the gradients of the mean over all rows that count, of all devices.

    Args:
        summed: this device's sums, as from `local_gradients`.
        counted_B: which of this device's rows count. Other devices may have more of them or fewer.
    """
    raise NotImplementedError("all_reduce_mean: see assignment/systems/tasks/data_parallel.md")


def make_data_parallel_step(loss: Loss, mesh: Mesh, microbatches: int = 1) -> Step:
    """Return a compiled step in which every device has all weights and moments, and its part of
    the batch. Gradients are sent once, after the last microbatch.

    Args:
        mesh: with the axis DATA.
    """
    raise NotImplementedError(
        "make_data_parallel_step: see assignment/systems/tasks/data_parallel.md"
    )

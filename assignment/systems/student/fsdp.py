"""Weights, moments and the batch split over all devices (fully sharded data parallel). Task:
`assignment/systems/tasks/fsdp.md`.

Axes as in `given.py`, N devices along DATA. A stack of L layers has "up" (L, D, F) and "down"
(L, F, D); a device has "up" (L, D / N, F) and "down" (L, F / N, D). The loop over layers is a
`jax.lax.scan`.
"""

import jax
from jax.sharding import Mesh, PartitionSpec

from ..given import DATA, Params
from .data_parallel import Step

PARTS = PartitionSpec(None, DATA)


def split(params: Params, mesh: Mesh) -> Params:
    """Return the weights of a stack with 1 / N of every layer's matrices on each device."""
    raise NotImplementedError("split: see assignment/systems/tasks/fsdp.md")


def gather(parts: Params) -> Params:
    """Return a layer's whole weights from this device's parts, inside `jax.shard_map`. The gradient
    of a part is the sum of all devices' gradients of that part."""
    raise NotImplementedError("gather: see assignment/systems/tasks/fsdp.md")


def forward(parts: Params, x_BD: jax.Array) -> jax.Array:
    """Return x after all layers, inside `jax.shard_map`. No device ever has more than about two
    layers' whole weights, neither here nor while this is differentiated: each layer's are gathered
    when it needs them, and again for its backward pass.

    Args:
        parts: this device's, of all layers.
        x_BD: this device's rows.
    """
    raise NotImplementedError("forward: see assignment/systems/tasks/fsdp.md")


def make_fsdp_step(mesh: Mesh) -> Step:
    """Return a compiled step for a stack of layers, with `given.summed_error` as its loss. Weights
    and moments come and go as `split` places them."""
    raise NotImplementedError("make_fsdp_step: see assignment/systems/tasks/fsdp.md")

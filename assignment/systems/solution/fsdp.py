"""Weights, moments and the batch split over all devices (fully sharded data parallel). Task:
`assignment/systems/tasks/fsdp.md`.

Axes as in `given.py`, N devices along DATA. A stack of L layers has "up" (L, D, F) and "down"
(L, F, D); a device has "up" (L, D / N, F) and "down" (L, F / N, D). The loop over layers is a
`jax.lax.scan`.
"""

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..given import DATA, Batch, Params, layer, sgd, summed_error
from .data_parallel import Step

PARTS = PartitionSpec(None, DATA)


def split(params: Params, mesh: Mesh) -> Params:
    """Return the weights of a stack with 1 / N of every layer's matrices on each device."""
    return jax.device_put(params, NamedSharding(mesh, PARTS))


def gather(parts: Params) -> Params:
    """Return a layer's whole weights from this device's parts, inside `jax.shard_map`. The gradient
    of a part is the sum of all devices' gradients of that part."""
    return jax.tree.map(lambda w: jax.lax.all_gather(w, DATA, axis=0, tiled=True), parts)


def forward(parts: Params, x_BD: jax.Array) -> jax.Array:
    """Return x after all layers, inside `jax.shard_map`. No device ever has more than about two
    layers' whole weights, neither here nor while this is differentiated: each layer's are gathered
    when it needs them, and again for its backward pass.

    Args:
        parts: this device's, of all layers.
        x_BD: this device's rows.
    """

    @jax.checkpoint
    def gathered_layer(x_BD: jax.Array, parts: Params) -> tuple[jax.Array, None]:
        return layer(gather(parts), x_BD), None

    return jax.lax.scan(gathered_layer, x_BD, parts)[0]


def make_fsdp_step(mesh: Mesh) -> Step:
    """Return a compiled step for a stack of layers, with `given.summed_error` as its loss. Weights
    and moments come and go as `split` places them."""

    def on_each_device(
        params: Params, moments: Params, batch: Batch
    ) -> tuple[Params, Params, jax.Array]:
        def loss(parts: Params) -> jax.Array:
            return summed_error(forward(parts, batch.inputs_BD), batch)

        value, gradients = jax.value_and_grad(loss)(params)
        value, count = jax.lax.psum((value, batch.counted_B.sum()), DATA)
        gradients = jax.tree.map(lambda g: g / count, gradients)
        return *sgd(params, moments, gradients), value / count

    return jax.jit(
        jax.shard_map(
            on_each_device,
            mesh=mesh,
            in_specs=(PARTS, PARTS, PartitionSpec(DATA)),
            out_specs=(PARTS, PARTS, PartitionSpec()),
        )
    )

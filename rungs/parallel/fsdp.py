"""FSDP: all-gather the weights of which each device along the data axis, and in mode `cp` along the
context axis, keeps a shard.

A layer's weights are gathered before the layer runs, and again in its backward pass, so that only
one or two layers are gathered at a time. The head stays gathered for the whole microbatch.
Gradients are reduce-scattered back to the shards.

The token embedding is not gathered, as a microbatch needs few of its rows: each device looks up its
columns of all devices' tokens, and they exchange the results.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.parallel import collectives
from rungs.parallel.names import BLOCKS, HEAD, TOKEN_AXES, TOKEN_EMBEDDING
from rungs.parallel.sharding import Layout, ShardedAxis, sharded_axis


def no_gather(weights: nnx.State) -> nnx.State:
    """Return a layer's weights unchanged: every device has all of them."""
    return weights


class WeightGatherer:
    """All-gathers a model's weights, layer by layer.

    Args:
        layout: of the model.
        model: with global arrays, real or abstract.
        compute_dtype: kernels of layers and the head are gathered in this dtype if it is narrower
            than their own; bfloat16 halves the bytes.

    Attributes:
        gather_layer: function from one layer's shards to its full weights, as the state of its
            block.
    """

    def __init__(self, layout: Layout, model: nnx.Module, compute_dtype: jnp.dtype) -> None:
        self._compute_dtype = compute_dtype
        specs = nnx.to_flat_state(layout.specs(nnx.state(model)))
        self._split_axes = {path: axis for path, spec in specs if (axis := sharded_axis(spec))}
        self.gather_layer = self._gather_layer if self._split_axes else no_gather

    def gather_outside_blocks(self, model: nnx.Module) -> None:
        """Gather, in place, all weights that are neither in a block nor the token embedding."""
        state = nnx.state(model)
        for path, variable in nnx.to_flat_state(state):
            if path[0] not in (BLOCKS, TOKEN_EMBEDDING) and path in self._split_axes:
                dtype = self._narrower_dtype(variable) if path[0] == HEAD else None
                variable.set_value(all_gather(variable.get_value(), self._split_axes[path], dtype))
        nnx.update(model, state)

    def _gather_layer(self, weights: nnx.State) -> nnx.State:
        gathered = []
        for path, variable in nnx.to_flat_state(weights):
            axis = self._split_axes.get((BLOCKS, *path))
            if axis is not None:
                dtype = self._narrower_dtype(variable)
                axis = axis._replace(array_axis=axis.array_axis - 1)
                variable = variable.replace(all_gather(variable.get_value(), axis, dtype))
            gathered.append((path, variable))
        return nnx.from_flat_state(gathered)

    def _narrower_dtype(self, variable: nnx.Variable) -> jnp.dtype | None:
        """Return the dtype to gather a weight in; None for its own."""
        own_dtype = variable.get_value().dtype
        is_narrower = self._compute_dtype.itemsize < own_dtype.itemsize
        return self._compute_dtype if variable.inputs and is_narrower else None


def of_all_devices(indices: Array) -> Array:
    """Return the indices (B, …) of all devices that have different tokens, one after the other."""
    return jax.lax.all_gather(indices, collectives.present_axes(TOKEN_AXES), axis=0, tiled=True)


def whole_rows(columns: Array) -> Array:
    """Return the complete rows of this device's part of B.

    Args:
        columns: this device's columns of the rows of all devices, (B, …, columns).
    """
    over, last = collectives.present_axes(TOKEN_AXES), columns.ndim - 1
    return jax.lax.all_to_all(columns, over, split_axis=0, concat_axis=last, tiled=True)


def whole_table(columns: Array, dtype: jnp.dtype) -> Array:
    """Return a table of which this device has some columns, in this dtype if it is narrower."""
    is_narrower = dtype.itemsize < columns.dtype.itemsize
    axis = ShardedAxis(columns.ndim - 1, collectives.present_axes(TOKEN_AXES))
    return all_gather(columns, axis, dtype if is_narrower else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(shard: Array, axis: ShardedAxis, dtype: jnp.dtype | None) -> Array:
    """Return the full array. Its gradient is reduce-scattered in float32.

    Args:
        shard: this device's part of the array.
        axis: the axis that is split over devices.
        dtype: dtype of the transfer and the result; None for the array's own.
    """
    shard = shard.astype(dtype or shard.dtype)
    return jax.lax.all_gather(shard, axis.mesh_axes, axis=axis.array_axis, tiled=True)


def _forward(shard: Array, axis: ShardedAxis, dtype: jnp.dtype | None) -> tuple[Array, None]:
    return all_gather(shard, axis, dtype), None


def _backward(
    axis: ShardedAxis, _dtype: jnp.dtype | None, _: None, gradient: Array
) -> tuple[Array]:
    gradient, over = gradient.astype(jnp.float32), axis.mesh_axes
    return (jax.lax.psum_scatter(gradient, over, scatter_dimension=axis.array_axis, tiled=True),)


all_gather.defvjp(_forward, _backward)

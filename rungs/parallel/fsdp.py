"""FSDP: all-gather weights that are sharded along the data axis, and in mode `cp` the context axis,
before a layer's forward and again its backward pass; sum gradients. The head stays gathered for the
whole microbatch. Token and value embeddings are never gathered: each device looks up its columns
for all devices' tokens, and they exchange the results."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.parallel import collectives
from rungs.parallel.sharding import BLOCKS, HEAD, LOOKED_UP, TOKEN_AXES, Layout, ShardedAxis


def no_gather(weights: nnx.State) -> nnx.State:
    """Return a layer's weights, which are replicated."""
    return weights


class Kept(NamedTuple):
    """A weight whose gathered value this device already has. Gradients are computed for `shard`."""

    shard: Array
    whole: Array

    @property
    def dtype(self) -> jnp.dtype:
        return self.whole.dtype


class WeightGatherer:
    """All-gathers a model's weights, layer by layer: `gather_layer` maps one layer's sharded block
    state to the full one. `split_axes` is `Layout.sharded_axes`; layers' kernels and the head are
    gathered in `compute_dtype` if it is narrower."""

    def __init__(
        self, split_axes: dict[tuple[Any, ...], ShardedAxis], compute_dtype: jnp.dtype
    ) -> None:
        self._compute_dtype = compute_dtype
        self._split_axes = split_axes
        self.gather_layer = self._gather_layer if split_axes else no_gather

    def gather_outside_blocks(self, model: nnx.Module) -> None:
        """Gather, in place, all weights that are neither in a block nor looked up by token."""
        state = nnx.state(model)
        for path, variable in nnx.to_flat_state(state):
            if path[0] not in (BLOCKS, *LOOKED_UP) and path in self._split_axes:
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
    """Return the concatenated indices (B, …) of all devices with different tokens."""
    return jax.lax.all_gather(indices, collectives.present_axes(TOKEN_AXES), axis=0, tiled=True)


def whole_rows(columns: Array) -> Array:
    """Return whole rows for this device's part of B from its columns of all devices' rows."""
    over, last = collectives.present_axes(TOKEN_AXES), columns.ndim - 1
    return jax.lax.all_to_all(columns, over, split_axis=0, concat_axis=last, tiled=True)


def own_columns(table: Array | Kept) -> Array:
    """Return the columns of a table that this device looks up."""
    return table.shard if isinstance(table, Kept) else table


def whole_table(columns: Array | Kept, dtype: jnp.dtype) -> Array:
    """Return the full table from its columns, in `dtype` if that is narrower than its own."""
    is_narrower = dtype.itemsize < columns.dtype.itemsize
    axis = ShardedAxis(1, collectives.present_axes(TOKEN_AXES))
    return all_gather(columns, axis, dtype if is_narrower else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(shard: Array | Kept, axis: ShardedAxis, dtype: jnp.dtype | None) -> Array:
    """Return the full array from a shard, with transfer and result in `dtype`; None for its own.
    Its gradient is reduce-scattered in float32."""
    if isinstance(shard, Kept):
        return collectives.to_varying(shard.whole, *axis.mesh_axes).astype(dtype or shard.dtype)
    shard = shard.astype(dtype or shard.dtype)
    return jax.lax.all_gather(shard, axis.mesh_axes, axis=axis.array_axis, tiled=True)


def reduce_scatter(gradient: Array, axis: ShardedAxis) -> Array:
    """Return this device's part of the sum of all devices' gradients, in float32."""
    gradient, over = gradient.astype(jnp.float32), axis.mesh_axes
    return jax.lax.psum_scatter(gradient, over, scatter_dimension=axis.array_axis, tiled=True)


def _backward(
    axis: ShardedAxis, _: jnp.dtype | None, is_kept: bool, gradient: Array
) -> tuple[Array | Kept]:
    summed = reduce_scatter(gradient, axis)
    return (Kept(summed, None) if is_kept else summed,)  # type: ignore[arg-type]


all_gather.defvjp(lambda shard, *args: (all_gather(shard, *args), type(shard) is Kept), _backward)


class GradientSum:
    """Sums a step's gradients over the devices with different tokens, also for replicated weights.
    Of those, each device gets the sum of the part that it updates: by a reduce-scatter after the
    last microbatch or, for a single microbatch, as soon as it is computed (`Kept`), while the layer
    below is differentiated. Where no axis divides evenly, every device gets the whole sum at the
    end. `gathered` has, by path, the axes of weights whose all-gather sums their gradient."""

    def __init__(self, layout: Layout, trained: nnx.State, microbatches: int) -> None:
        sharded = layout.sharded_axes(trained)
        self._updated = layout.for_updates.sharded_axes(trained)
        self.gathered = self._updated if microbatches == 1 else sharded
        self._kept = {path: axis for path, axis in self.gathered.items() if path not in sharded}

    def sources(self, trained: nnx.State) -> nnx.State:
        """Return the variables to differentiate, inside `jax.shard_map`."""

        def source(path: tuple[Any, ...], weight: nnx.Variable) -> nnx.Variable:
            if path in self._kept:
                return weight.replace(_own_part(weight.get_value(), self._kept[path]))
            if path in self.gathered:
                return weight
            return collectives.to_varying(weight, *TOKEN_AXES)

        return nnx.map_state(source, trained)

    def weights(self, sources: nnx.State, trained: nnx.State) -> nnx.State:
        """Return the model's weights as a function of `sources`."""
        whole = dict(nnx.to_flat_state(trained))

        def weight(path: tuple[Any, ...], source: nnx.Variable) -> nnx.Variable:
            if path not in self._kept:
                return source
            return source.replace(Kept(source.get_value(), whole[path].get_value()))

        return nnx.map_state(weight, sources)

    def of(self, gradient: nnx.State) -> nnx.State:
        """Return the sum over devices of gradients of `sources`, in the layout for updates."""

        def total(path: tuple[Any, ...], own: nnx.Variable) -> nnx.Variable:
            if path in self.gathered:
                return own
            if path in self._updated:
                return own.replace(reduce_scatter(own.get_value(), self._updated[path]))
            return collectives.psum(own, *TOKEN_AXES)

        return nnx.map_state(total, gradient)


def _own_part(whole: Array, axis: ShardedAxis) -> Array:
    """Return this device's part of a replicated array."""
    size = whole.shape[axis.array_axis] // collectives.axis_size(*axis.mesh_axes)
    start = collectives.axis_index(*axis.mesh_axes) * size
    return jax.lax.dynamic_slice_in_dim(whole, start, size, axis.array_axis)

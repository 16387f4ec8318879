"""Sums of gradients over the devices that have different tokens.

A weight of which each device has a shard is all-gathered, and the derivative of that is its sum. Of
a weight that every device has whole, each gets the sum of the part that it updates. There are two
ways to it:

    after the last microbatch   each device adds up its own gradients, then one reduce-scatter
    as soon as it is computed   as in FSDP, without the all-gather: `fsdp.Kept`. The reduce-scatter
                                of a layer runs while the layer below computes its gradients

Of what no axis divides, every device gets the whole sum, after the last microbatch.
"""

from typing import Any

import jax
from flax import nnx
from jax import Array

from rungs.parallel import collectives
from rungs.parallel.fsdp import Kept, reduce_scatter
from rungs.parallel.names import TOKEN_AXES
from rungs.parallel.sharding import Layout, ShardedAxis


class GradientSum:
    """How a step's gradients are added up.

    Args:
        layout: of the weights.
        trained: the weights, as global arrays.
        microbatches: of the step. Only the gradients of a single one are added up as soon as they
            are computed.

    Attributes:
        gathered: by path, the axes of the weights whose all-gather adds up their gradient.
    """

    def __init__(self, layout: Layout, trained: nnx.State, microbatches: int) -> None:
        sharded = layout.sharded_axes(trained)
        self._updated = layout.for_updates.sharded_axes(trained)
        self.gathered = self._updated if microbatches == 1 else sharded
        self._kept = {path: axis for path, axis in self.gathered.items() if path not in sharded}

    def sources(self, trained: nnx.State) -> nnx.State:
        """Return what to compute the gradient of, inside `jax.shard_map`."""

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
        """Return the sum, over devices, of gradients of `sources`, in the layout for updates."""

        def total(path: tuple[Any, ...], own: nnx.Variable) -> nnx.Variable:
            if path in self.gathered:
                return own
            if path in self._updated:
                return own.replace(reduce_scatter(own.get_value(), self._updated[path]))
            return collectives.psum(own, *TOKEN_AXES)

        return nnx.map_state(total, gradient)


def _own_part(whole: Array, axis: ShardedAxis) -> Array:
    """Return this device's part of an array that every device has whole."""
    size = whole.shape[axis.array_axis] // collectives.axis_size(*axis.mesh_axes)
    start = collectives.axis_index(*axis.mesh_axes) * size
    return jax.lax.dynamic_slice_in_dim(whole, start, size, axis.array_axis)

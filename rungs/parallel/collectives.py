"""`psum`, `pmax` and others over mesh axes, inside `jax.shard_map`. Along an axis that is absent
(outside `shard_map`) or has one device, they return their argument, so the model's code is the same
for one device and many."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from rungs.parallel.sharding import TENSOR


def axis_size(*axes: str) -> int:
    """Return the number of devices along mesh axes; 1 outside of `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return math.prod(mesh.shape[axis] for axis in axes if axis in mesh.manual_axes)


def axis_index(*axes: str) -> Array | int:
    """Return the index of this device along mesh axes."""
    present = present_axes(axes)
    return jax.lax.axis_index(present) if present else 0


def vocabulary_offset(rows: int) -> Array | int:
    """Return the first token id of this device's `rows` rows of a vocabulary split over TENSOR."""
    return axis_index(TENSOR) * rows


def psum(x: Any, *axes: str) -> Any:
    """Return the sum of x, an array or a tree of arrays, over the devices along mesh axes."""
    present = present_axes(axes)
    return jax.lax.psum(x, present) if present else x


def pmax(x: Array, *axes: str) -> Array:
    """Return the maximum of x over the devices along mesh axes."""
    present = present_axes(axes)
    return jax.lax.pmax(x, present) if present else x


def pmin(x: Array, *axes: str) -> Array:
    """Return the minimum of x over the devices along mesh axes."""
    present = present_axes(axes)
    return jax.lax.pmin(x, present) if present else x


def all_to_all(x: Array, axis: str, *, split: int, joined: int) -> Array:
    """Return x after an exchange along a mesh axis: each device sends every other one its part of
    array axis `split`, and concatenates the parts it receives along array axis `joined`."""
    if axis_size(axis) == 1:
        return x
    return jax.lax.all_to_all(x, axis, split_axis=split, concat_axis=joined, tiled=True)


def all_gather(x: Array, axis: str, *, joined: int) -> Array:
    """Return the parts of all devices along a mesh axis, concatenated along array axis `joined`."""
    if axis_size(axis) == 1:
        return x
    return jax.lax.all_gather(x, axis, axis=joined, tiled=True)


def replicate(x: Array, axis: str, *, joined: int) -> Array:
    """Return what `all_gather` does, as the same on all devices along the mesh axis."""
    size = axis_size(axis)
    if size == 1:
        return x
    zeros = jnp.zeros_like(jnp.concatenate([x] * size, axis=joined))
    first = axis_index(axis) * x.shape[joined]
    zeros, x = to_common_varying(zeros, x)
    return jax.lax.psum(jax.lax.dynamic_update_slice_in_dim(zeros, x, first, joined), axis)


def to_varying(x: Any, *axes: str) -> Any:
    """Return x, replicated along mesh axes, as varying along them. Each device then has its own
    gradient of the result, and the gradient of x is their sum."""
    present = present_axes(axes)
    return jax.lax.pcast(x, present, to="varying") if present else x


def to_common_varying(*trees: Any) -> tuple[Any, ...]:
    """Return the trees with each array varying along every mesh axis along which any varies."""
    axes = frozenset[str]().union(*map(_varying_axes, jax.tree.leaves(trees)))

    def lift(array: Array) -> Array:
        missing = tuple(sorted(axes - _varying_axes(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(lift, trees)


def present_axes(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the mesh axes with several devices."""
    return tuple(axis for axis in axes if axis_size(axis) > 1)


def _varying_axes(array: Array) -> frozenset[str]:
    return jax.typeof(array).manual_axis_type.varying

"""What one device's part of the work knows of the others.

Inside `jax.shard_map` each device runs the same program on its own part of every array, and says
where it needs the others. The functions here say it, for a mesh axis by name; along an axis that is
not there (outside of such a program) or has one device only they do nothing, so that a model reads
the same on one device and on many.
"""

from typing import Any

import jax
from jax import Array

DATA, TENSOR = "data", "tensor"


def count(axis: str) -> int:
    """How many devices share the work along a mesh axis; 1 outside of `jax.shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def number(axis: str) -> Array | int:
    """Which of them this device is, from 0."""
    return jax.lax.axis_index(axis) if count(axis) > 1 else 0


def first_of_vocabulary(rows: int) -> Array | int:
    """The token of the first of this device's rows, where devices share the vocabulary."""
    return number(TENSOR) * rows


def summed(x: Any, *axes: str) -> Any:
    """The sum of the devices' x; of each array, where x is a tree."""
    several = tuple(axis for axis in axes if count(axis) > 1)
    return jax.lax.psum(x, several) if several else x


def largest(x: Array, axis: str) -> Array:
    """The largest of the devices' x."""
    return jax.lax.pmax(x, axis) if count(axis) > 1 else x


def least(x: Array) -> Array:
    """The smallest of x on all devices of the mesh."""
    several = tuple(axis for axis in (DATA, TENSOR) if count(axis) > 1)
    return jax.lax.pmin(x, several) if several else x


def apart(x: Any, axis: str) -> Any:
    """x, alike on all devices along a mesh axis, as something that each has a copy of its own of:
    the gradient of the copy is the device's own, that of x the sum of them."""
    return jax.lax.pcast(x, axis, to="varying") if count(axis) > 1 else x


def alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, each as something that every device has a copy of its own of, along the mesh axes
    along which one of them is."""
    axes = frozenset[str]().union(*map(_own_along, arrays))

    def lifted(array: Array) -> Array:
        missing = tuple(sorted(axes - _own_along(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return tuple(map(lifted, arrays))


def _own_along(array: Array) -> frozenset[str]:
    axes: frozenset[str] = jax.typeof(array).manual_axis_type.varying
    return axes

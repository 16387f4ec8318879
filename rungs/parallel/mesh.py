"""The mesh of devices; names of its axes, of array axes, and of parts of the model."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

DATA, CONTEXT, TENSOR = "data", "context", "tensor"
"""The mesh axes. A mesh has `DATA` and one of the other two."""
TOKEN_AXES = (DATA, CONTEXT)
"""Mesh axes along which devices have different tokens: sequences or parts of them."""
BLOCKS, HEAD, TOKEN_EMBEDDING = "blocks", "head", "token_embedding"
VALUE_EMBEDDING = "value_embedding"
"""First parts of parameter paths: stacked layers, output head, token and value embedding."""
LOOKED_UP = (TOKEN_EMBEDDING, VALUE_EMBEDDING)
"""Tables that are looked up by token."""
VOCABULARY = "vocab"
"""The array axis that is padded to fit the mesh."""
POSITION = "position"
"""The array axis of learned positions."""
MESH_AXIS_NAMES = (DATA, TENSOR)
_AXIS_TYPE = AxisType.Auto
"""XLA chooses how intermediate results are split."""


def create_mesh(
    mesh_shape: Sequence[int],
    mesh_axis_names: Sequence[str] = MESH_AXIS_NAMES,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Return a mesh of devices, the closest ones along the last axis. `mesh_shape` has the number
    of devices along each axis; −1, at most once, stands for all remaining. `devices` defaults to
    all devices of all hosts. Raises ValueError if the sizes do not multiply to their number."""
    devices, names = jax.devices() if devices is None else devices, tuple(mesh_axis_names)
    shape = _resolve_shape(tuple(mesh_shape), names, len(devices))
    return jax.make_mesh(shape, names, axis_types=(_AXIS_TYPE,) * len(names), devices=devices)


def abstract_mesh(mesh_shape: Sequence[int], mesh_axis_names: Sequence[str]) -> AbstractMesh:
    """Return a mesh of any size without devices."""
    names = tuple(mesh_axis_names)
    return AbstractMesh(tuple(mesh_shape), names, axis_types=(_AXIS_TYPE,) * len(names))


def one_device() -> Mesh:
    """Return the mesh of this host's first device."""
    return create_mesh((1, 1), devices=jax.local_devices()[:1])


def size_along(mesh: Mesh | AbstractMesh, *axes: str) -> int:
    """Return the number of devices along mesh axes; 1 along an axis that the mesh lacks."""
    return math.prod(mesh.shape.get(axis, 1) for axis in axes)


def _resolve_shape(
    shape: tuple[int, ...], names: tuple[str, ...], available: int
) -> tuple[int, ...]:
    """Return the shape with −1 replaced by a size."""
    if len(shape) != len(names):
        raise ValueError(f"a mesh of {shape}: give a size for each of {', '.join(names)}")
    if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
        raise ValueError(f"a mesh of {shape}: sizes must be at least 1, or −1 once for the rest")
    given = math.prod(size for size in shape if size != -1)
    mesh = f"a mesh of {_as_text(shape, names)}"
    suggestion = f"{_as_text(_nearest_shape(shape, available), names)} would fit"
    if -1 in shape and available % given:
        raise ValueError(f"{mesh}: {given} does not divide the {available} devices; {suggestion}")
    if -1 not in shape and given != available:
        raise ValueError(f"{mesh} needs {given} devices; there are {available}; {suggestion}")
    return tuple(available // given if size == -1 else size for size in shape)


def _as_text(shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    return " × ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))


def _nearest_shape(shape: tuple[int, ...], available: int) -> tuple[int, ...]:
    """Return the shape that uses all devices with last sizes nearest to the requested ones."""
    last_sizes: list[int] = []
    for size in reversed(shape[1:]):
        divisors = (n for n in range(1, available + 1) if available % n == 0)
        nearest = min((abs(n - size), n) for n in divisors)[1]
        last_sizes.insert(0, nearest)
        available //= nearest
    return (available, *last_sizes)


def dotted(path: tuple[Any, ...]) -> str:
    """Return the dotted name in checkpoints for a path of `nnx.to_flat_state`."""
    return ".".join(str(part) for part in path)

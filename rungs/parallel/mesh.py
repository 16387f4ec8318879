"""The mesh of devices, and where each array lives on it.

A parameter names its axes (`axes` in its metadata); `MESH_AXES` says for each mode over which mesh
axis an array axis is split. What is not split is replicated. One device is the mesh of shape
(1, 1).
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rungs.config.model_config import ModelConfig
from rungs.config.train_config import Mode, ShardingConfig, mode_problem
from rungs.parallel import target_device
from rungs.parallel.axes import DATA, TENSOR

MESH_AXIS_NAMES = (DATA, TENSOR)
TILE = 128
"""Columns of a product that accelerators compute at once."""
_SPLIT_PRODUCTS = {"heads": TENSOR, "kv_heads": TENSOR, "ffn": TENSOR, "vocab": TENSOR}
_SPLIT_STATE = {"emb": DATA, "ffn": DATA, "head_dim": DATA, "heads": DATA, "kv_heads": DATA}
MESH_AXES: dict[Mode, dict[str, str]] = {
    "dp": {},
    "fsdp": _SPLIT_STATE,
    "tp": _SPLIT_PRODUCTS,
    "fsdp_tp": {**_SPLIT_PRODUCTS, "emb": DATA, "head_dim": DATA},
}
"""For each mode the mesh axis of an array axis. A mesh axis splits one axis of an array, the first
of those listed that it divides."""


def get_sharding_config_for_mode(mode: str) -> dict[str, str]:
    """The table from array axis to mesh axis.

    Raises:
        ValueError: no such mode.
    """
    if mode not in MESH_AXES:
        raise ValueError(f"sharding.mode: {mode!r} is none of {', '.join(MESH_AXES)}")
    return MESH_AXES[mode]


def create_mesh(
    mesh_shape: Sequence[int],
    mesh_axis_names: Sequence[str] = MESH_AXIS_NAMES,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """A mesh over devices, the last axis over those that are nearest to each other.

    Args:
        mesh_shape: devices along each axis; −1, once, for the rest.
        mesh_axis_names: a name for each.
        devices: all there are, of all hosts, where absent.

    Raises:
        ValueError: the sizes don't multiply to the devices.
    """
    devices = jax.devices() if devices is None else devices
    shape = _whole_shape(tuple(mesh_shape), tuple(mesh_axis_names), len(devices))
    return jax.make_mesh(
        shape,
        tuple(mesh_axis_names),
        axis_types=(AxisType.Auto,) * len(shape),
        devices=devices,
    )


def one_device() -> Mesh:
    """The mesh of this host's first device."""
    return create_mesh((1, 1), devices=jax.local_devices()[:1])


def validate_mesh_for_mode(mesh: Mesh, mode: str) -> None:
    """Check that a mode can run on a mesh.

    Raises:
        ValueError: no such mode, the mesh has other axes than `data` and `tensor`, or their sizes
            are not those that the mode needs.
    """
    get_sharding_config_for_mode(mode)
    if mesh.axis_names != MESH_AXIS_NAMES:
        raise ValueError(f"the mesh has the axes {mesh.axis_names}, not {MESH_AXIS_NAMES}")
    if line := mode_problem(mode, mesh.shape[DATA], mesh.shape[TENSOR]):
        raise ValueError(line)


class Layout(NamedTuple):
    """How arrays lie on devices: a mesh, and the mode of sharing the work on it."""

    mesh: Mesh
    mode: Mode = "dp"

    @classmethod
    def of(cls, sharding: ShardingConfig | None, mesh: Mesh | None = None) -> "Layout":
        """The layout that `sharding` in `train.json` names, of one device where there is no mesh.

        Raises:
            ValueError: the mesh does not fit the mode.
        """
        mode = sharding.mode if sharding and mesh is not None else "dp"
        layout = cls(mesh if mesh is not None else one_device(), mode)
        validate_mesh_for_mode(layout.mesh, mode)
        return layout

    def spec(self, axes: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
        """Over which mesh axis each axis of an array is split.

        Args:
            axes: names of its last axes; those before them are not split.
            shape: of the whole array.
        """
        names: list[str | None] = [None] * len(shape)
        first = len(shape) - len(axes)
        for axis, mesh_axis in MESH_AXES[self.mode].items():
            size = self.mesh.shape[mesh_axis]
            if axis in axes and size > 1 and mesh_axis not in names:
                place = first + axes.index(axis)
                if names[place] is None and shape[place] % size == 0:
                    names[place] = mesh_axis
        return PartitionSpec(*_without_trailing_none(names))

    def specs(self, state: nnx.State) -> Any:
        """The spec of each variable of a model or optimizer, by the axes it declares.

        Returns:
            A tree shaped as `state`, a PartitionSpec in place of each variable.
        """

        def spec(variable: nnx.Variable) -> PartitionSpec:
            axes = variable.get_metadata().get("axes", ())
            return self.spec(axes, variable.get_value().shape)

        return jax.tree.map(spec, state, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def shardings(self, state: nnx.State) -> Any:
        """As `specs`, a NamedSharding for each."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            self.specs(state),
            is_leaf=is_spec,
        )

    def batch_spec(self, rank: int) -> PartitionSpec:
        """Of a batch (…, B, S): B split over the data axis."""
        names = [None] * (rank - 2) + [DATA if self.mesh.shape[DATA] > 1 else None]
        return PartitionSpec(*_without_trailing_none(names))

    def padded(self, vocab_size: int) -> int:
        """Rows that a vocabulary has in memory: so that it divides over the tensor axis and, but on
        a CPU, in whole tiles of products."""
        parts = self.mesh.shape[TENSOR]
        whole = parts if _is_cpu(self.mesh) else parts * TILE
        return math.ceil(vocab_size / whole) * whole

    def problems(self, model: ModelConfig) -> list[str]:
        """A line for each dimension of a model that does not divide as the mode needs it."""
        axes, lines = MESH_AXES[self.mode], []
        for key, axis, mesh_axis, size in _divided_dimensions(model):
            parts = self.mesh.shape[mesh_axis] if axes.get(axis) == mesh_axis else 1
            if size % parts and not (axis == "kv_heads" and parts % size == 0):
                near = " or ".join(str(n) for n in _nearest_multiples(size, parts))
                lines.append(
                    f"{key}: {size} is not divisible by the {parts} devices of sharding."
                    f"{mesh_axis}; use {near}"
                )
        return lines


def _is_cpu(mesh: Mesh | AbstractMesh) -> bool:
    """Whether its devices are CPUs; where there are none, those that are planned."""
    if isinstance(mesh, AbstractMesh):
        return target_device.platform() == "cpu"
    return bool(mesh.devices.flat[0].platform == "cpu")


def is_spec(node: Any) -> bool:
    """Whether it is a leaf of a tree of specs."""
    return isinstance(node, PartitionSpec)


def keep_layout(layout: Layout, *modules: nnx.Module | nnx.Optimizer) -> None:
    """See that updated arrays stay where they were."""
    for module in modules:
        state = nnx.state(module)
        nnx.update(module, jax.lax.with_sharding_constraint(state, layout.shardings(state)))


def own_rows(mesh: Mesh, size: int) -> np.ndarray:
    """Which of a batch's rows this process's devices need, of `size` in all."""
    sharding = NamedSharding(mesh, Layout(mesh).batch_spec(2))
    places = sharding.addressable_devices_indices_map((size, 1)).values()
    return np.unique([np.arange(size)[place[0]] for place in places if place])


def place_batch(mesh: Mesh, *arrays: np.ndarray, size: int | None = None) -> tuple[Array, ...]:
    """Host arrays (…, B, S) onto the mesh.

    Args:
        size: rows B of the whole batch, where the arrays have only this process's `own_rows`.
    """

    def place(array: np.ndarray) -> Array:
        sharding = NamedSharding(mesh, Layout(mesh).batch_spec(array.ndim))
        shape = (*array.shape[:-2], size or array.shape[-2], array.shape[-1])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return tuple(map(place, arrays))


def _whole_shape(shape: tuple[int, ...], names: tuple[str, ...], available: int) -> tuple[int, ...]:
    """The shape with −1 filled in."""
    if len(shape) != len(names):
        raise ValueError(f"a mesh of {shape}: needs a size for each of {', '.join(names)}")
    if shape.count(-1) > 1 or any(size < 1 and size != -1 for size in shape):
        raise ValueError(f"a mesh of {shape}: sizes are at least 1, or −1 once for the rest")
    given = math.prod(size for size in shape if size != -1)
    near = f"{_shown(_nearest_shape(shape, available), names)} would do"
    if -1 in shape:
        if available % given:
            raise ValueError(
                f"a mesh of {_shown(shape, names)}: {given} does not divide the {available}"
                f" devices; {near}"
            )
        return tuple(available // given if size == -1 else size for size in shape)
    if given != available:
        raise ValueError(
            f"a mesh of {_shown(shape, names)} needs {given} devices; there are {available}; {near}"
        )
    return shape


def _shown(shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    return " × ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))


def _nearest_shape(shape: tuple[int, ...], available: int) -> tuple[int, ...]:
    """The mesh of all devices whose last sizes are nearest to those asked for."""
    whole: list[int] = []
    for size in reversed(shape[1:]):
        divisors = (n for n in range(1, available + 1) if available % n == 0)
        nearest = min((abs(n - size), n) for n in divisors)[1]
        whole.insert(0, nearest)
        available //= nearest
    return (available, *whole)


def _without_trailing_none(names: list[str | None]) -> list[str | None]:
    """P(None) and P() are one place, but two cache keys."""
    while names and names[-1] is None:
        names = names[:-1]
    return names


def _divided_dimensions(model: ModelConfig) -> list[tuple[str, str, str, int]]:
    """Key in `model.json`, array axis, the mesh axis that may divide it, and size; what else a
    mode divides is small, and stays whole where it does not divide."""
    dimensions = [("emb_dim", "emb", DATA, model.emb_dim)]
    if model.n_layers and model.n_heads:
        dimensions.append(("n_heads", "heads", TENSOR, model.n_heads))
        dimensions.append(("n_kv_heads", "kv_heads", TENSOR, model.n_kv_heads or model.n_heads))
    if model.n_layers and model.feed_forward != "none":
        key = "ffn_dim" if model.ffn_dim else "ffn_dim (4 × emb_dim)"
        dimensions.append((key, "ffn", TENSOR, model.hidden_dim))
    return dimensions


def _nearest_multiples(size: int, parts: int) -> list[int]:
    below = size // parts * parts
    return [below, below + parts] if below else [parts]

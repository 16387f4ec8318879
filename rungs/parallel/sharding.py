"""The sharding modes, and where each array and batch lives on the mesh.

A parameter declares the names of its axes (`axes` in its metadata). `MESH_AXES` says for each mode
which array axis is split over which mesh axis. Axes that are not split are replicated.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from rungs.config.model_config import ModelConfig
from rungs.config.train_config import Mode, ShardingConfig, mode_problem
from rungs.parallel import target_device
from rungs.parallel.mesh import MESH_AXIS_NAMES, one_device
from rungs.parallel.names import DATA, TENSOR, VOCABULARY

TILE = 128
"""Columns of a matmul that accelerators compute at once."""
_SPLIT_MATMULS = {"heads": TENSOR, "kv_heads": TENSOR, "ffn": TENSOR, "vocab": TENSOR}
_SPLIT_STATE = {"emb": DATA, "ffn": DATA, "head_dim": DATA, "heads": DATA, "kv_heads": DATA}
MESH_AXES: dict[Mode, dict[str, str]] = {
    "dp": {},
    "fsdp": _SPLIT_STATE,
    "tp": _SPLIT_MATMULS,
    "fsdp_tp": {**_SPLIT_MATMULS, "emb": DATA, "head_dim": DATA},
}
"""For each mode, the mesh axis over which an array axis is split. A mesh axis splits only one axis
of an array: the first one listed here whose size it divides."""


def get_sharding_config_for_mode(mode: str) -> dict[str, str]:
    """Return the table from array axis to mesh axis.

    Raises:
        ValueError: no such mode.
    """
    if mode not in MESH_AXES:
        raise ValueError(f"sharding.mode: {mode!r} must be one of {', '.join(MESH_AXES)}")
    return MESH_AXES[mode]


def validate_mesh_for_mode(mesh: Mesh, mode: str) -> None:
    """Check that a mode can run on a mesh.

    Raises:
        ValueError: there is no such mode, the mesh has other axes than `data` and `tensor`, or
            their sizes do not fit the mode.
    """
    get_sharding_config_for_mode(mode)
    if mesh.axis_names != MESH_AXIS_NAMES:
        raise ValueError(f"the mesh has the axes {mesh.axis_names}, not {MESH_AXIS_NAMES}")
    if line := mode_problem(mode, mesh.shape[DATA], mesh.shape[TENSOR]):
        raise ValueError(line)


class Layout(NamedTuple):
    """How arrays are laid out on devices: a mesh and a sharding mode."""

    mesh: Mesh
    mode: Mode = "dp"

    @classmethod
    def of(cls, sharding: ShardingConfig | None, mesh: Mesh | None = None) -> "Layout":
        """Return the layout for `sharding` in `train.json`; of one device if there is no mesh.

        Raises:
            ValueError: the mesh does not fit the mode.
        """
        mode = sharding.mode if sharding and mesh is not None else "dp"
        layout = cls(mesh if mesh is not None else one_device(), mode)
        validate_mesh_for_mode(layout.mesh, mode)
        return layout

    def spec(self, axes: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
        """Return over which mesh axis each axis of an array is split.

        Args:
            axes: names of the array's last axes; axes before those are not split.
            shape: global shape of the array.
        """
        names: list[str | None] = [None] * len(shape)
        first = len(shape) - len(axes)
        for axis, mesh_axis in MESH_AXES[self.mode].items():
            size = self.mesh.shape[mesh_axis]
            if axis in axes and size > 1 and mesh_axis not in names:
                index = first + axes.index(axis)
                if names[index] is None and shape[index] % size == 0:
                    names[index] = mesh_axis
        return PartitionSpec(*_without_trailing_none(names))

    def specs(self, state: nnx.State) -> Any:
        """Return a tree like `state` with a PartitionSpec in place of each variable.

        Args:
            state: of a model or optimizer; its variables declare their axes.
        """

        def spec(variable: nnx.Variable) -> PartitionSpec:
            axes = variable.get_metadata().get("axes", ())
            return self.spec(axes, variable.get_value().shape)

        return jax.tree.map(spec, state, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def shardings(self, state: nnx.State) -> Any:
        """Return a tree like `state` with a NamedSharding in place of each variable."""
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            self.specs(state),
            is_leaf=is_spec,
        )

    def batch_spec(self, rank: int) -> PartitionSpec:
        """Return the spec of a batch (…, B, S): B is split over the data axis."""
        names = [None] * (rank - 2) + [DATA if self.mesh.shape[DATA] > 1 else None]
        return PartitionSpec(*_without_trailing_none(names))

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the rows of the vocabulary in memory: a multiple of the tensor axis and, except on
        a CPU, of whole matmul tiles."""
        parts = self.mesh.shape[TENSOR]
        multiple = parts if _is_cpu(self.mesh) else parts * TILE
        return math.ceil(vocab_size / multiple) * multiple

    def problems(self, model: ModelConfig) -> list[str]:
        """Return a line for each model dimension that the mode must divide but cannot."""
        axes, lines = MESH_AXES[self.mode], []
        for key, axis, mesh_axis, size in _dimensions_to_divide(model):
            parts = self.mesh.shape[mesh_axis] if axes.get(axis) == mesh_axis else 1
            if size % parts and not (axis == "kv_heads" and parts % size == 0):
                near = " or ".join(str(n) for n in _nearest_multiples(size, parts))
                lines.append(
                    f"{key}: {size} is not divisible by the {parts} devices of sharding."
                    f"{mesh_axis}; use {near}"
                )
        return lines


def padded_axis(variable: nnx.Variable) -> int | None:
    """Return which axis of a parameter or moment is the vocabulary, the one that is padded."""
    axes = variable.get_metadata().get("axes", ())
    return axes.index(VOCABULARY) if VOCABULARY in axes else None


def is_spec(node: Any) -> bool:
    """Return whether a node is a leaf of a tree of specs."""
    return isinstance(node, PartitionSpec)


def keep_layout(layout: Layout, *modules: nnx.Module | nnx.Optimizer) -> None:
    """Constrain the updated arrays of modules to stay where they were."""
    for module in modules:
        state = nnx.state(module)
        nnx.update(module, jax.lax.with_sharding_constraint(state, layout.shardings(state)))


def process_local_rows(mesh: Mesh, size: int) -> np.ndarray:
    """Return the indices of the rows that this process's devices need of a batch of `size` rows."""
    sharding = NamedSharding(mesh, Layout(mesh).batch_spec(2))
    indices = sharding.addressable_devices_indices_map((size, 1)).values()
    return np.unique([np.arange(size)[index[0]] for index in indices if index])


def place_batch(mesh: Mesh, *arrays: np.ndarray, size: int | None = None) -> tuple[Array, ...]:
    """Copy host arrays (…, B, S) to the mesh.

    Args:
        size: B of the global batch, if the arrays only have this process's `process_local_rows`.
    """

    def place(array: np.ndarray) -> Array:
        sharding = NamedSharding(mesh, Layout(mesh).batch_spec(array.ndim))
        shape = (*array.shape[:-2], size or array.shape[-2], array.shape[-1])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return tuple(map(place, arrays))


def _is_cpu(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether the devices are CPUs; an abstract mesh has those of the target device."""
    if isinstance(mesh, AbstractMesh):
        return target_device.platform() == "cpu"
    return bool(mesh.devices.flat[0].platform == "cpu")


def _without_trailing_none(names: list[str | None]) -> list[str | None]:
    """P(None) and P() place an array alike, but are different keys of the compilation cache."""
    while names and names[-1] is None:
        names = names[:-1]
    return names


def _dimensions_to_divide(model: ModelConfig) -> list[tuple[str, str, str, int]]:
    """Return the dimensions that must divide: key in `model.json`, array axis, mesh axis, size.

    Other dimensions that a mode splits are small, and are replicated if they do not divide.
    """
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

"""The mesh of devices, the sharding modes, and where each array and batch lives on the mesh.

A parameter declares the names of its axes (`axes` in its metadata); `MESH_AXES` says which of them
each mode splits over which mesh axis. The others are replicated."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rungs.config.model_config import ModelConfig
from rungs.config.sharding_config import Mode, ShardingConfig, indivisible, mesh_axes, mode_problem
from rungs.parallel import target_device

DATA, CONTEXT, TENSOR = "data", "context", "tensor"
"""The mesh axes. A mesh has `DATA` and one of the other two."""
ALL_AXES = (DATA, CONTEXT, TENSOR)
TOKEN_AXES = (DATA, CONTEXT)
"""Mesh axes along which devices have different tokens: sequences or parts of them."""
BLOCKS, HEAD, TOKEN_EMBEDDING = "blocks", "head", "token_embedding"
VALUE_EMBEDDING = "value_embedding"
"""First parts of parameter paths: stacked layers, output head, token and value embedding."""
PREDICTION, LAYERS = "prediction", (BLOCKS, "prediction")
"""Likewise of the module of multi-token prediction, and of all that has layers."""
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
    if -1 in shape and available % given:
        raise ValueError(f"{mesh}: {given} does not divide the {available} devices")
    if -1 not in shape and given != available:
        has_idle = given < available and jax.process_count() == 1
        advice = f'; "devices": {given} would leave the others idle' * has_idle
        raise ValueError(f"{mesh} needs {given} devices; there are {available}{advice}")
    return tuple(available // given if size == -1 else size for size in shape)


def _as_text(shape: tuple[int, ...], names: tuple[str, ...]) -> str:
    return " × ".join(f"{name} {size}" for name, size in zip(names, shape, strict=True))


def dotted(path: tuple[Any, ...]) -> str:
    """Return the dotted name in checkpoints for a path of `nnx.to_flat_state`."""
    return ".".join(str(part) for part in path)


MeshAxes = str | tuple[str, ...]
"""A mesh axis, or several together."""
TILE = 128
"""Columns of a matmul that accelerators compute at once."""
_SPLIT_MATMULS = dict.fromkeys(("heads", "kv_heads", "ffn", "vocab"), TENSOR)
_LATENTS = ("latent", "query_latent")
_SPLIT_STATE = ("emb", "value", "ffn", "head_dim", "heads", "kv_heads", *_LATENTS)
MESH_AXES: dict[Mode, dict[str, MeshAxes]] = {
    "dp": {},
    "fsdp": dict.fromkeys(_SPLIT_STATE, DATA),
    "tp": {**_SPLIT_MATMULS},
    "fsdp_tp": {**_SPLIT_MATMULS, **dict.fromkeys(("emb", "value", "head_dim", *_LATENTS), DATA)},
    "cp": dict.fromkeys(_SPLIT_STATE, TOKEN_AXES),
}
"""Mesh axis, or axes together, over which an array axis is split, by mode. A mesh axis splits only
one axis of an array: the first listed here whose size it divides."""


def validate_mesh_for_mode(mesh: Mesh, mode: str) -> None:
    """Raise ValueError if there is no such mode, or the mesh's axes or sizes do not fit it."""
    if mode not in MESH_AXES:
        raise ValueError(f"sharding.mode: {mode!r} must be one of {', '.join(MESH_AXES)}")
    if mesh.axis_names != mesh_axes(mode):
        raise ValueError(
            f"the mesh has the axes {mesh.axis_names}; mode {mode!r} needs {mesh_axes(mode)}"
        )
    if line := mode_problem(mode, *mesh.shape.values()):
        raise ValueError(line)


class Layout(NamedTuple):
    """How arrays are laid out on devices: a mesh and a sharding mode."""

    mesh: Mesh
    mode: Mode = "dp"

    @classmethod
    def of(cls, sharding: ShardingConfig | None, mesh: Mesh | None = None) -> "Layout":
        """Return the layout for `sharding` in `train.json`, on one device without a mesh. Raises
        ValueError if the mesh does not fit the mode."""
        if mesh is None:
            return cls(one_device())
        layout = cls(mesh, sharding.mode if sharding else "dp")
        validate_mesh_for_mode(layout.mesh, layout.mode)
        return layout

    @property
    def for_updates(self) -> "Layout":
        """The layout of summed gradients and optimizer state. In `dp`, where weights are
        replicated, it is that of `fsdp`: each device updates its part (ZeRO-1; Rajbhandari et al.
        2019, section 5.1). Not on CPUs, where devices share memory and collectives take longer than
        the update; see docs/performance.md."""
        is_split = self.mode == "dp" and target_device.platform() != "cpu"
        return self._replace(mode="fsdp") if is_split else self

    def spec(self, axes: Sequence[str], shape: Sequence[int]) -> PartitionSpec:
        """Return the mesh axis or axes over which each axis of an array is split. `axes` names its
        last axes; earlier ones are not split. `shape` is global."""
        names: list[MeshAxes | None] = [None] * len(shape)
        first = len(shape) - len(axes)
        for axis, over in MESH_AXES[self.mode].items():
            mesh_axis, size = self._present(over), size_along(self.mesh, *as_tuple(over))
            if axis in axes and size > 1 and mesh_axis not in names:
                index = first + axes.index(axis)
                if names[index] is None and shape[index] % size == 0:
                    names[index] = mesh_axis
        return _spec(names)

    def specs(self, state: nnx.State) -> Any:
        """Return PartitionSpecs in a tree like `state`, whose variables declare their axes."""

        def spec(variable: nnx.Variable) -> PartitionSpec:
            axes = variable.get_metadata().get("axes", ())
            return self.spec(axes, variable.get_value().shape)

        return jax.tree.map(spec, state, is_leaf=lambda node: isinstance(node, nnx.Variable))

    def shardings(self, state: nnx.State) -> Any:
        """Return a tree like `state` with a NamedSharding per variable."""
        specs = self.specs(state)
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec),
            specs,
            is_leaf=lambda node: isinstance(node, PartitionSpec),
        )

    def sharded_axes(self, state: nnx.State) -> dict[tuple[Any, ...], "ShardedAxis"]:
        """Return, by path, the axis that FSDP splits of each variable that it splits."""
        specs = nnx.to_flat_state(self.specs(state))
        return {path: axis for path, spec in specs if (axis := sharded_axis(spec))}

    def batch_spec(self, rank: int) -> PartitionSpec:
        """Return the spec of a batch (…, B, S): B over the data axis, S over the context axis."""
        return _spec([None] * (rank - 2) + [self._present(axis) for axis in TOKEN_AXES])

    def rows_spec(self) -> PartitionSpec:
        """Return the spec of an array with one number per sequence, (B,)."""
        return _spec([self._present(DATA)])

    def _present(self, over: MeshAxes) -> MeshAxes | None:
        """Return the mesh axes with several devices, in the form of a PartitionSpec."""
        present = tuple(axis for axis in as_tuple(over) if size_along(self.mesh, axis) > 1)
        return present if len(present) > 1 else next(iter(present), None)

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the rows of the vocabulary in memory: a multiple of the tensor axis and, except on
        a CPU, of a matmul tile."""
        parts = size_along(self.mesh, TENSOR)
        multiple = parts if _is_cpu(self.mesh) else parts * TILE
        return math.ceil(vocab_size / multiple) * multiple

    def problems(self, model: ModelConfig) -> list[str]:
        """Return a line for each model dimension that the mode must divide but cannot."""
        last = self.mesh.axis_names[-1]
        over_data = MESH_AXES[self.mode].get("emb", ())
        # other dimensions that a mode splits are small, and replicated if not divisible
        dimensions: list[tuple[str, MeshAxes, int]] = [("emb_dim", over_data, model.emb_dim)]
        if model.n_layers and model.n_heads:
            dimensions.append(("n_heads", last, model.n_heads))
            dimensions.append(("n_kv_heads", last, model.n_kv_heads or model.n_heads))
        if model.n_layers and model.delta_net:
            dimensions.append(("delta_net.key_heads", last, model.delta_net.key_heads))
        if model.n_layers and model.feed_forward != "none":
            key = "ffn_dim" if model.ffn_dim else "ffn_dim (4 × emb_dim)"
            dimensions.append((key, TENSOR, model.hidden_dim))
            dimensions.append(("shared_ffn_dim", TENSOR, model.shared_ffn_dim or 0))
            dimensions.append(("dense_ffn_dim", TENSOR, model.dense_ffn_dim or 0))
        lines = []
        for key, over, size in dimensions:
            parts = size_along(self.mesh, *as_tuple(over))
            may_repeat = key == "n_kv_heads" and parts % size == 0
            if not may_repeat and (line := indivisible(key, size, parts, *as_tuple(over))):
                lines.append(line)
        return lines


def padded_axis(variable: nnx.Variable) -> int | None:
    """Return the index of a parameter's or moment's vocabulary axis, which is padded, or None."""
    axes = variable.get_metadata().get("axes", ())
    return axes.index(VOCABULARY) if VOCABULARY in axes else None


def as_tuple(over: MeshAxes) -> tuple[str, ...]:
    """Return the mesh axes of one entry of a table or a PartitionSpec as a tuple."""
    return (over,) if isinstance(over, str) else over


class ShardedAxis(NamedTuple):
    """The array axis that FSDP splits."""

    array_axis: int
    mesh_axes: tuple[str, ...]


def sharded_axis(spec: PartitionSpec) -> ShardedAxis | None:
    """Return the axis of an array that FSDP splits; None if replicated or split by tensor only."""
    for index, over in enumerate(spec):
        if over is not None and set(TOKEN_AXES) & set(as_tuple(over)):
            return ShardedAxis(index, as_tuple(over))
    return None


def constrain(layout: Layout, module: nnx.Module | nnx.Optimizer, only: Any = ...) -> None:
    """Constrain the arrays of a module, or only variables of a kind, to a layout."""
    state = nnx.state(module, only)
    nnx.update(module, jax.lax.with_sharding_constraint(state, layout.shardings(state)))


def process_local_rows(mesh: Mesh, size: int) -> np.ndarray:
    """Return the indices of a batch's `size` rows that this process's devices need."""
    sharding = NamedSharding(mesh, Layout(mesh).rows_spec())
    indices = sharding.addressable_devices_indices_map((size,)).values()
    return np.unique([np.arange(size)[index[0]] for index in indices if index])


def place_batch(mesh: Mesh, *arrays: np.ndarray | None, size: int | None = None) -> tuple[Any, ...]:
    """Copy host arrays (B, S), (A, B, S) or (A, B, S, K) to the mesh; None stays None. `size` is B
    of the global batch, if the arrays only have this process's `process_local_rows`."""

    def place(array: np.ndarray) -> Array:
        rank = min(array.ndim, 3)
        sharding = NamedSharding(mesh, Layout(mesh).batch_spec(rank))
        shape = (*array.shape[: rank - 2], size or array.shape[rank - 2], *array.shape[rank - 1 :])
        return jax.make_array_from_process_local_data(sharding, array, shape)

    return jax.tree.map(place, arrays)


def _is_cpu(mesh: Mesh | AbstractMesh) -> bool:
    """Return whether the devices are CPUs; for an abstract mesh, whether the target device is."""
    if isinstance(mesh, AbstractMesh):
        return target_device.platform() == "cpu"
    return bool(mesh.devices.flat[0].platform == "cpu")


def _spec(names: list[MeshAxes | None]) -> PartitionSpec:
    """Return the spec without trailing None: P(None) and P() mean the same, but are different keys
    of the compilation cache."""
    while names and names[-1] is None:
        names = names[:-1]
    return PartitionSpec(*names)

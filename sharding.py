"""The mesh of devices, and where each array lives on it.

A parameter names its axes (`axes` in its metadata); `MESH_AXES` says for each mode which mesh
axis an array axis is split over. What is not named there is replicated. One device is the mesh of
shape (1, 1).
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train_config import TrainConfig

MESH_AXIS_NAMES = ("data", "tensor")
MESH_AXES: dict[str, dict[str, str]] = {"dp": {}}


def data_devices(train: TrainConfig, available: int, recorded: int | None = None) -> int:
    """How many devices share each microbatch.

    What `train.json` says; where it says nothing, what an earlier start of this run recorded, if
    that many are there; else all, or one where microbatch_size does not divide by them.

    Args:
        available: devices at hand.
        recorded: devices that the run's last checkpoint was trained on.

    Raises:
        ValueError: more devices asked for than there are, or the microbatch does not divide.
    """
    size = train.microbatch_size
    if train.sharding is None:
        wanted = recorded if recorded and recorded <= available else available
        return wanted if size % wanted == 0 else 1
    wanted = available if train.sharding.data == -1 else train.sharding.data
    if wanted > available:
        raise ValueError(f"sharding.data: {wanted} devices asked for, {available} at hand")
    if size % wanted:
        raise ValueError(
            f"microbatch_size: {size} does not divide by the {wanted} devices there are;"
            f" {-(-size // wanted) * wanted} would"
        )
    return wanted


def create_mesh(
    mesh_shape: Sequence[int], mesh_axis_names: Sequence[str] = MESH_AXIS_NAMES
) -> Mesh:
    """A mesh over the first devices there are, as many as the shape needs.

    Raises:
        ValueError: fewer devices than the shape needs.
    """
    needed, devices = int(np.prod(mesh_shape)), jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"a mesh of {tuple(mesh_shape)} needs {needed} devices, not {len(devices)}"
        )
    grid = np.array(devices[:needed]).reshape(mesh_shape)
    return Mesh(grid, tuple(mesh_axis_names), axis_types=(AxisType.Auto,) * len(mesh_shape))


def batch_sharding(mesh: Mesh, rank: int) -> NamedSharding:
    """Where a batch lives: its second-to-last axis (B) split over the data axis."""
    axes = [None] * (rank - 2) + ["data", None]
    return NamedSharding(mesh, PartitionSpec(*axes))


def place_batch(mesh: Mesh, *arrays: np.ndarray) -> tuple[jax.Array, ...]:
    """Host arrays (…, B, S) onto the mesh."""
    return tuple(jax.device_put(array, batch_sharding(mesh, array.ndim)) for array in arrays)


def state_shardings(state: nnx.State, mesh: Mesh, mode: str = "dp") -> Any:
    """Where each variable of a model or optimizer lives, by the axes it declares.

    Returns:
        A tree shaped as `state`, a NamedSharding in place of each variable.
    """

    def place(variable: nnx.Variable) -> NamedSharding:
        axes = variable.get_metadata().get("axes", ())
        stacked = variable.get_value().ndim - len(axes)
        names = [None] * stacked + [MESH_AXES[mode].get(axis) for axis in axes]
        while names and names[-1] is None:  # P(None) and P() are one place, but two cache keys
            names.pop()
        return NamedSharding(mesh, PartitionSpec(*names))

    return jax.tree.map(place, state, is_leaf=lambda node: isinstance(node, nnx.Variable))

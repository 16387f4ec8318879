"""One model on many devices. Task: `assignment/tasks/sharding.md`.

A mesh is a grid of devices with named axes, here "data" and "tensor". A sharding says for each axis
of an array over which axis of the mesh it is split; None: every device has all of it.

    mode      mesh (data, tensor)   every device has
    dp        (n, 1)                all weights; its part of the batch
    fsdp      (n, 1)                its part of the weights, and of the batch
    tp        (1, n)                its heads and hidden units; the whole batch
    fsdp_tp   (n, m)                both: its part of its heads and hidden units, and of the batch
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax
from flax import nnx
from jax.sharding import Mesh

from .model import TransformerLM

Axes = tuple[str | None, ...]
"""A mesh axis, or None, for each axis of an array."""


@dataclass(frozen=True)
class ShardingConfig:
    """How each kind of weight is split."""

    dense_in: Axes
    """(inputs, outputs) of matrices whose outputs are heads or hidden units: Q_proj, K_proj,
    V_proj, w1, w3."""
    dense_out: Axes
    """(inputs, outputs) of matrices whose inputs are: O_proj, w2."""
    embedding: Axes
    """(vocabulary, D)."""
    lm_head: Axes
    """(D, vocabulary)."""
    norm: Axes
    """(D,)."""


def create_mesh(mesh_shape: Sequence[int], mesh_axis_names: Sequence[str]) -> Mesh:
    """Return a mesh of the first devices, on which the compiler decides what devices send each
    other (`AxisType.Auto`).

    Args:
        mesh_shape: devices along each axis, such as [4, 2].
        mesh_axis_names: such as ["data", "tensor"].

    Raises:
        ValueError: there are fewer devices.
    """
    raise NotImplementedError("create_mesh: see assignment/tasks/sharding.md")


def get_sharding_config_for_mode(mode: str) -> ShardingConfig:
    """Return how weights are split in a mode: dp, fsdp, tp or fsdp_tp. Raises ValueError for
    another."""
    raise NotImplementedError("get_sharding_config_for_mode: see assignment/tasks/sharding.md")


def get_batch_sharding_for_mode(mode: str) -> Axes:
    """Return how a batch (B, S) is split in a mode: over "data" if the mode splits anything over
    it. Raises ValueError for an unknown mode."""
    raise NotImplementedError("get_batch_sharding_for_mode: see assignment/tasks/sharding.md")


def validate_mesh_for_mode(mesh: Mesh, mode: str) -> None:
    """Check that a mesh has the axes "data" and "tensor", with more than one device along those
    over which a mode splits, and with one along the others. Raises ValueError if not, or for an
    unknown mode."""
    raise NotImplementedError("validate_mesh_for_mode: see assignment/tasks/sharding.md")


def validate_model_partitioning(
    model_config: Mapping[str, Any], mesh: Mesh, sharding_config: ShardingConfig
) -> None:
    """Check that every axis of a weight can be split evenly, without creating any. Raises
    ValueError with the weight's name if not."""
    raise NotImplementedError("validate_model_partitioning: see assignment/tasks/sharding.md")


def create_model_and_optimizer(
    rngs: nnx.Rngs,
    model_config: Mapping[str, Any],
    optimizer_config: Mapping[str, Any],
    sharding_config: ShardingConfig | None = None,
    mesh: Mesh | None = None,
    gradient_clip: float | None = None,
    lr_schedule: optax.Schedule | None = None,
) -> tuple[TransformerLM, nnx.Optimizer]:
    """Return a model and its optimizer. With a mesh, both are created inside one compiled function,
    each device computing only its part, so that no device ever has all weights; the moments of a
    weight are split as it is, everything else is on every device.

    Args:
        rngs: of the initial weights, which are the same with and without a mesh.
        model_config: arguments of TransformerLM, all but `rngs`.
        optimizer_config, gradient_clip, lr_schedule: of `build_optimizer_transform`.
        sharding_config, mesh: both or neither; without, everything is on the first device.
    """
    raise NotImplementedError("create_model_and_optimizer: see assignment/tasks/sharding.md")

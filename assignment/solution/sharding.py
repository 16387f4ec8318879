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

import jax
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from .model import TransformerLM
from .optimizer import build_optimizer_transform

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


CONFIGS = {
    "dp": ShardingConfig(
        dense_in=(None, None),
        dense_out=(None, None),
        embedding=(None, None),
        lm_head=(None, None),
        norm=(None,),
    ),
    "fsdp": ShardingConfig(
        dense_in=("data", None),
        dense_out=(None, "data"),
        embedding=(None, "data"),
        lm_head=("data", None),
        norm=(None,),
    ),
    "tp": ShardingConfig(
        dense_in=(None, "tensor"),
        dense_out=("tensor", None),
        embedding=(None, "tensor"),
        lm_head=(None, "tensor"),
        norm=(None,),
    ),
    "fsdp_tp": ShardingConfig(
        dense_in=("data", "tensor"),
        dense_out=("tensor", "data"),
        embedding=("tensor", "data"),
        lm_head=("data", "tensor"),
        norm=(None,),
    ),
}
SPLIT_AXES = {"dp": {"data"}, "fsdp": {"data"}, "tp": {"tensor"}, "fsdp_tp": {"data", "tensor"}}
"""The mesh axes over which a mode splits anything."""
KINDS = {
    **dict.fromkeys(("Q_proj", "K_proj", "V_proj", "w1", "w3"), "dense_in"),
    **dict.fromkeys(("O_proj", "w2"), "dense_out"),
    **dict.fromkeys(("RMSNorm1", "RMSNorm2", "ln1"), "norm"),
    "token_embeddings": "embedding",
    "linear": "lm_head",
}
"""The field of ShardingConfig for each layer that has weights."""


def create_mesh(mesh_shape: Sequence[int], mesh_axis_names: Sequence[str]) -> Mesh:
    """Return a mesh of the first devices, on which the compiler decides what devices send each
    other (`AxisType.Auto`).

    Args:
        mesh_shape: devices along each axis, such as [4, 2].
        mesh_axis_names: such as ["data", "tensor"].

    Raises:
        ValueError: there are fewer devices.
    """
    auto = (AxisType.Auto,) * len(mesh_shape)
    return jax.make_mesh(tuple(mesh_shape), tuple(mesh_axis_names), axis_types=auto)


def get_sharding_config_for_mode(mode: str) -> ShardingConfig:
    """Return how weights are split in a mode: dp, fsdp, tp or fsdp_tp. Raises ValueError for
    another."""
    _check_mode(mode)
    return CONFIGS[mode]


def get_batch_sharding_for_mode(mode: str) -> Axes:
    """Return how a batch (B, S) is split in a mode: over "data" if the mode splits anything over
    it. Raises ValueError for an unknown mode."""
    _check_mode(mode)
    return ("data" if "data" in SPLIT_AXES[mode] else None, None)


def validate_mesh_for_mode(mesh: Mesh, mode: str) -> None:
    """Check that a mesh has the axes "data" and "tensor", with more than one device along those
    over which a mode splits, and with one along the others. Raises ValueError if not, or for an
    unknown mode."""
    _check_mode(mode)
    for axis in ("data", "tensor"):
        size = mesh.shape.get(axis)
        if size is None:
            raise ValueError(f"the mesh has no axis {axis!r}")
        if (size > 1) != (axis in SPLIT_AXES[mode]):
            wanted = "several devices" if axis in SPLIT_AXES[mode] else "one device"
            raise ValueError(f"{mode} needs {wanted} along {axis!r}, not {size}")


def validate_model_partitioning(
    model_config: Mapping[str, Any], mesh: Mesh, sharding_config: ShardingConfig
) -> None:
    """Check that every axis of a weight can be split evenly, without creating any. Raises
    ValueError with the weight's name if not."""
    model = nnx.eval_shape(lambda: TransformerLM(nnx.Rngs(0), **model_config))
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        shape = variable.get_value().shape
        for size, axis in zip(shape, _spec(path, sharding_config), strict=True):
            if axis and size % mesh.shape[axis]:
                name = ".".join(map(str, path))
                raise ValueError(f"{name}: {size} is not divisible by {mesh.shape[axis]} ({axis})")


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
    transform = build_optimizer_transform(optimizer_config, gradient_clip, lr_schedule)

    def create(key: jax.Array) -> tuple[TransformerLM, nnx.Optimizer]:
        model = TransformerLM(nnx.Rngs(key), **model_config)
        optimizer = nnx.Optimizer(model, transform, wrt=nnx.Param)
        if mesh is not None and sharding_config is not None:
            _constrain(model, mesh, sharding_config)
            _constrain(optimizer, mesh, sharding_config)
        return model, optimizer

    return nnx.jit(create)(rngs())


def _check_mode(mode: str) -> None:
    if mode not in CONFIGS:
        raise ValueError(f"mode {mode!r}: must be one of {', '.join(CONFIGS)}")


def _spec(path: Sequence[Any], config: ShardingConfig) -> Axes:
    """Return how the array at a path of a state is split, in a model or in an optimizer, whose
    moments have the paths of their weights with more in front."""
    kind = KINDS.get(path[-2]) if len(path) > 1 else None
    return getattr(config, kind) if kind else ()


def _constrain(module: nnx.Module | nnx.Optimizer, mesh: Mesh, config: ShardingConfig) -> None:
    """Inside a compiled function, say where the arrays of a module have to be."""

    def sharding(path: tuple[Any, ...], _: object) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*_spec(path, config)))

    state = nnx.state(module)
    shardings = nnx.map_state(sharding, state)
    nnx.update(module, jax.lax.with_sharding_constraint(state, shardings))

"""create_mesh, the modes' shardings, their checks, and create_model_and_optimizer."""

import functools
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXES = ["data", "tensor"]
MESHES = {"dp": [4, 1], "fsdp": [8, 1], "tp": [1, 4], "fsdp_tp": [4, 2]}
MODEL = {
    "d_model": 16,
    "num_heads": 4,
    "d_ff": 24,
    "theta": 100.0,
    "vocab_size": 32,
    "context_length": 8,
    "num_layers": 1,
}
OPTIMIZER = {"type": "adamw", "lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.1}
KINDS = {
    **{f"MHA.{name}_proj": "dense_in" for name in "QKV"},
    **{"SwiGLU.w1": "dense_in", "SwiGLU.w3": "dense_in"},
    **{"MHA.O_proj": "dense_out", "SwiGLU.w2": "dense_out"},
    **{"RMSNorm1": "norm", "RMSNorm2": "norm"},
}


def expected_specs(config: Any) -> dict[str, tuple]:
    """Return how each parameter is split, by path."""
    layer = {name: getattr(config, kind) for name, kind in KINDS.items()}
    specs = {f"layers.0.{name}": spec for name, spec in layer.items()}
    others = {"token_embeddings": config.embedding, "linear": config.lm_head, "ln1": config.norm}
    return {f"{name}.weights": spec for name, spec in (specs | others).items()}


def arrays(module: Any, only: Any = ...) -> dict[str, jax.Array]:
    flat = nnx.to_flat_state(nnx.state(module, only))
    return {".".join(map(str, path)): variable.get_value() for path, variable in flat}


def make(code: ModuleType, mode: str) -> tuple[Mesh, Any, nnx.Module, nnx.Optimizer]:
    mesh, config = code.create_mesh(MESHES[mode], AXES), code.get_sharding_config_for_mode(mode)
    made = code.create_model_and_optimizer(nnx.Rngs(0), MODEL, OPTIMIZER, config, mesh)
    return mesh, config, *made


def check_sharding(array: jax.Array, mesh: Mesh, spec: tuple, name: str) -> None:
    assert array.sharding.is_equivalent_to(NamedSharding(mesh, PartitionSpec(*spec)), array.ndim), (
        f"{name} is split as {getattr(array.sharding, 'spec', 'on one device')} instead of {spec}."
        " In"
        " an optimizer, a moment is split as its weight is: its path ends with the weight's"
    )
    sizes = [1 if axis is None else mesh.shape[axis] for axis in spec]
    part = tuple(n // size for n, size in zip(array.shape, sizes, strict=True))
    assert {shard.data.shape for shard in array.addressable_shards} == {part}, name
    assert len({shard.device for shard in array.addressable_shards}) == mesh.size, name


def test_create_mesh_names_the_axes(code: ModuleType) -> None:
    mesh = code.create_mesh([2, 3], AXES)
    assert dict(mesh.shape) == {"data": 2, "tensor": 3}
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}, (
        "the compiler decides what devices send each other: axis_types are AxisType.Auto"
    )


def test_create_mesh_needs_enough_devices(code: ModuleType) -> None:
    with pytest.raises(ValueError, match="9"):
        code.create_mesh([9, 1], AXES)


@pytest.mark.parametrize("mode", MESHES)
def test_validate_mesh_for_mode_accepts_its_mesh(code: ModuleType, mode: str) -> None:
    code.validate_mesh_for_mode(code.create_mesh(MESHES[mode], AXES), mode)


@pytest.mark.parametrize(
    ("mode", "shape"),
    [
        *[("dp", [4, 2]), ("dp", [1, 1]), ("fsdp", [1, 8]), ("tp", [4, 2]), ("tp", [8, 1])],
        *[("fsdp_tp", [8, 1]), ("fsdp_tp", [1, 8]), ("pp", [8, 1])],
    ],
)
def test_validate_mesh_for_mode_refuses_others(
    code: ModuleType, mode: str, shape: list[int]
) -> None:
    mesh = code.create_mesh(shape, AXES)
    with pytest.raises(ValueError, match=mode):
        code.validate_mesh_for_mode(mesh, mode)


def test_validate_mesh_for_mode_needs_both_axes(code: ModuleType) -> None:
    mesh = code.create_mesh([8], ["data"])
    with pytest.raises(ValueError, match="tensor"):
        code.validate_mesh_for_mode(mesh, "dp")


@pytest.mark.parametrize("name", ["get_sharding_config_for_mode", "get_batch_sharding_for_mode"])
def test_unknown_modes_are_refused(code: ModuleType, name: str) -> None:
    with pytest.raises(ValueError, match="pp"):
        getattr(code, name)("pp")


@pytest.mark.parametrize(
    ("mode", "axes"),
    [("dp", set()), ("fsdp", {"data"}), ("tp", {"tensor"}), ("fsdp_tp", {"data", "tensor"})],
)
def test_get_sharding_config_for_mode_splits_all_but_norms(
    code: ModuleType, mode: str, axes: set[str]
) -> None:
    config = code.get_sharding_config_for_mode(mode)
    for spec in (config.dense_in, config.dense_out, config.embedding, config.lm_head):
        assert len(spec) == 2
        assert set(spec) - {None} == axes, (
            f"{mode} splits a matrix over {axes or 'nothing'}: {spec}"
        )
    assert config.norm == (None,), "every device has all of a norm's scale, which is small"
    if "tensor" in axes:
        assert config.dense_in[1] == config.dense_out[0] == "tensor", (
            "outputs of the matrices before (dense_in) and inputs of those after (dense_out) are"
            " split"
            " over tensor, so that a device needs nothing of the others in between"
        )


def test_batch_sharding_splits_rows(code: ModuleType) -> None:
    found = {mode: code.get_batch_sharding_for_mode(mode) for mode in MESHES}
    rows = ("data", None)
    wanted = {"dp": rows, "fsdp": rows, "tp": (None, None), "fsdp_tp": rows}
    for mode, spec in wanted.items():
        assert found[mode] == spec, (
            f"{mode}: {found[mode]} instead of {spec}. Rows of a batch go over data, and positions"
            " over"
            " nothing; with tp every device has the whole batch"
        )


def test_validate_model_partitioning_names_what_does_not_fit(code: ModuleType) -> None:
    mesh, config = code.create_mesh([1, 4], AXES), code.get_sharding_config_for_mode("tp")
    code.validate_model_partitioning(MODEL, mesh, config)
    with pytest.raises(ValueError, match=r"SwiGLU\.w\d.*22"):
        code.validate_model_partitioning(MODEL | {"d_ff": 22}, mesh, config)


@pytest.mark.parametrize("mode", MESHES)
def test_create_model_and_optimizer_splits_weights_and_moments(code: ModuleType, mode: str) -> None:
    mesh, config, model, optimizer = make(code, mode)
    parameters, specs = arrays(model, nnx.Param), expected_specs(config)
    assert parameters.keys() == specs.keys()
    for name, array in parameters.items():
        check_sharding(array, mesh, specs[name], name)
    moments = {name: array for name, array in arrays(optimizer).items() if array.ndim}
    assert len(moments) == 2 * len(parameters)
    for name, array in moments.items():
        [spec] = [spec for end, spec in specs.items() if name.endswith(f".{end}")]
        check_sharding(array, mesh, spec, name)


def loss(model: Any, tokens: jax.Array) -> jax.Array:
    scores = optax.softmax_cross_entropy_with_integer_labels(model(tokens[:, :-1]), tokens[:, 1:])
    return scores.mean()


@nnx.jit
def take_step(model: Any, optimizer: nnx.Optimizer, tokens: jax.Array) -> jax.Array:
    value, gradients = nnx.value_and_grad(loss)(model, tokens)
    optimizer.update(model, gradients)
    return value


TOKENS = np.random.default_rng(6).integers(32, size=(8, 9)).astype(np.int32)


@functools.cache
def after_a_step_alone(code: ModuleType) -> tuple[float, dict[str, np.ndarray]]:
    model, optimizer = code.create_model_and_optimizer(nnx.Rngs(0), MODEL, OPTIMIZER, None, None)
    before = float(take_step(model, optimizer, jnp.asarray(TOKENS)))
    return before, {name: np.asarray(each) for name, each in arrays(model, nnx.Param).items()}


@pytest.mark.parametrize("mode", MESHES)
def test_a_sharded_step_is_that_of_one_device(code: ModuleType, mode: str) -> None:
    expected_loss, expected = after_a_step_alone(code)
    mesh, _, model, optimizer = make(code, mode)
    rows = NamedSharding(mesh, PartitionSpec(*code.get_batch_sharding_for_mode(mode)))
    found = take_step(model, optimizer, jax.device_put(TOKENS, rows))
    assert float(found) == pytest.approx(expected_loss, rel=1e-5), (
        "the loss is not that of one device: initial weights must be the same with and without a"
        " mesh"
    )
    for name, array in arrays(model, nnx.Param).items():
        np.testing.assert_allclose(array, expected[name], atol=2e-5, err_msg=name)


def test_create_model_and_optimizer_can_do_without_a_mesh(code: ModuleType) -> None:
    model, optimizer = code.create_model_and_optimizer(nnx.Rngs(0), MODEL, OPTIMIZER, None, None)
    for array in [*arrays(model).values(), *arrays(optimizer).values()]:
        assert len(array.addressable_shards) == 1, "without a mesh, all is on one device"


def test_create_model_and_optimizer_passes_clip_and_schedule_on(code: ModuleType) -> None:
    model, optimizer = code.create_model_and_optimizer(
        nnx.Rngs(0), MODEL, OPTIMIZER, gradient_clip=1.0, lr_schedule=lambda _: 0.0
    )
    before = arrays(model, nnx.Param)
    take_step(model, optimizer, jnp.asarray(TOKENS))
    for name, array in arrays(model, nnx.Param).items():
        assert (array == before[name]).all(), (
            f"{name} moves, though the schedule has a rate of 0: give gradient_clip and"
            " lr_schedule to"
            " build_optimizer_transform"
        )

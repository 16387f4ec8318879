"""Where each array lives: on real devices, against what each mode promises, written by hand."""

import fnmatch
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import Mode, ShardingConfig
from rungs.model.gpt import GPT
from rungs.parallel.sharding import (
    MESH_AXES,
    MESH_AXIS_NAMES,
    Layout,
    abstract_mesh,
    create_mesh,
    place_batch,
    process_local_rows,
    validate_mesh_for_mode,
)
from rungs.parallel.target_device import Target, trace_for
from rungs.step.state import AbstractState, create_model_and_optimizer, named_arrays
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.sharded_models import (
    LENGTH,
    random_weights,
    run_of,
    step_batch,
)

P = PartitionSpec
MESHES: dict[str, dict[str, tuple[int, int]]] = {
    "gpt2": {"dp": (8, 1), "fsdp": (8, 1), "tp": (1, 8), "fsdp_tp": (4, 2), "cp": (1, 8)},
    "llama": {"dp": (8, 1), "fsdp": (8, 1), "tp": (1, 4), "fsdp_tp": (2, 4), "cp": (2, 4)},
    "experts": {"dp": (4, 1), "fsdp": (8, 1), "tp": (1, 4), "fsdp_tp": (4, 2), "cp": (2, 4)},
    "no-layers": {"dp": (8, 1), "fsdp": (4, 1), "tp": (1, 8), "fsdp_tp": (2, 2), "cp": (2, 2)},
    "recipe": {"dp": (8, 1), "fsdp": (8, 1), "tp": (1, 4), "fsdp_tp": (2, 4), "cp": (2, 4)},
    "olmo": {"dp": (8, 1), "fsdp": (8, 1), "tp": (1, 4), "fsdp_tp": (2, 4), "cp": (2, 4)},
    "sinks": {"dp": (8, 1), "fsdp": (8, 1), "tp": (1, 4), "fsdp_tp": (2, 4), "cp": (2, 4)},
    "latent": {"dp": (8, 1), "fsdp": (8, 1), "tp": (1, 4), "fsdp_tp": (2, 4), "cp": (2, 4)},
}
# Sizes of each axis; one that is split over data or tensor is followed by /d or /t. An axis of the
# vocabulary has as many rows as divide. What has one place in fsdp, tp and fsdp_tp has one entry.
# In cp all devices together split what is split over data in fsdp: /a.
PLACES: dict[str, dict[str, str]] = {
    "gpt2": {
        "token_embedding.embedding": "61 16/d | 64/t 16 | 62/t 16/d",
        "position_embedding.embedding": "8 16/d | 8 16 | 8 16/d",
        "final_norm.*": "16/d | 16 | 16/d",
        "head.kernel": "16/d 61 | 16 64/t | 16/d 62/t",
        "blocks.*_norm.*": "2 16/d | 2 16 | 2 16/d",
        "blocks.attention.[qkv]*.kernel": "2 16/d 8 2 | 2 16 8/t 2 | 2 16/d 8/t 2",
        "blocks.attention.[qkv]*.bias": "2 8/d 2 | 2 8/t 2 | 2 8/t 2",
        "blocks.attention.output.kernel": "2 8 2 16/d | 2 8/t 2 16 | 2 8/t 2 16/d",
        "blocks.attention.output.bias": "2 16/d | 2 16 | 2 16/d",
        "blocks.feed_forward.up.kernel": "2 16/d 64 | 2 16 64/t | 2 16/d 64/t",
        "blocks.feed_forward.up.bias": "2 64/d | 2 64/t | 2 64/t",
        "blocks.feed_forward.down.kernel": "2 64 16/d | 2 64/t 16 | 2 64/t 16/d",
        "blocks.feed_forward.down.bias": "2 16/d | 2 16 | 2 16/d",
    },
    "llama": {
        "token_embedding.embedding": "61 16/d | 64/t 16 | 64/t 16/d",
        "final_norm.scale": "16/d | 16 | 16/d",
        "blocks.*_norm.scale": "3 16/d | 3 16 | 3 16/d",
        "blocks.attention.query_norm.scale": "3 4 | 3 4 | 3 4/d",
        "blocks.attention.key_norm.scale": "3 4 | 3 4 | 3 4/d",
        "blocks.attention.query.kernel": "3 16/d 8 4 | 3 16 8/t 4 | 3 16/d 8/t 4",
        # fewer heads of keys than devices: each has all of them
        "blocks.attention.[kv]*.kernel": "3 16/d 2 4 | 3 16 2 4 | 3 16/d 2 4",
        "blocks.attention.output.kernel": "3 8 4 16/d | 3 8/t 4 16 | 3 8/t 4 16/d",
        "blocks.feed_forward.gate.kernel": "3 16/d 32 | 3 16 32/t | 3 16/d 32/t",
        "blocks.feed_forward.up.kernel": "3 16/d 32 | 3 16 32/t | 3 16/d 32/t",
        "blocks.feed_forward.down.kernel": "3 32 16/d | 3 32/t 16 | 3 32/t 16/d",
    },
    "experts": {
        "token_embedding.embedding": "61 16/d | 64/t 16 | 62/t 16/d",
        "position_embedding.embedding": "8 16/d | 8 16 | 8 16/d",
        "head.kernel": "16/d 61 | 16 64/t | 16/d 62/t",
        "blocks.*_norm.*": "2 16/d | 2 16 | 2 16/d",
        "blocks.attention.[qkv]*.kernel": "2 16/d 8 2 | 2 16 8/t 2 | 2 16/d 8/t 2",
        "blocks.attention.output.kernel": "2 8 2 16/d | 2 8/t 2 16 | 2 8/t 2 16/d",
        "blocks.attention.output.bias": "2 16/d | 2 16 | 2 16/d",
        "blocks.feed_forward.router.kernel": "2 16/d 4 | 2 16 4 | 2 16/d 4",
        "blocks.feed_forward.gate.kernel": "2 4 16/d 24 | 2 4 16 24/t | 2 4 16/d 24/t",
        "blocks.feed_forward.up.kernel": "2 4 16/d 24 | 2 4 16 24/t | 2 4 16/d 24/t",
        "blocks.feed_forward.down.kernel": "2 4 24 16/d | 2 4 24/t 16 | 2 4 24/t 16/d",
        "blocks.feed_forward.gate.bias": "2 4 24/d | 2 4 24/t | 2 4 24/t",
        "blocks.feed_forward.up.bias": "2 4 24/d | 2 4 24/t | 2 4 24/t",
        "blocks.feed_forward.down.bias": "2 4 16/d | 2 4 16 | 2 4 16/d",
    },
    "no-layers": {
        "token_embedding.embedding": "61 16/d | 64/t 16 | 62/t 16/d",
        "final_norm.scale": "16/d | 16 | 16/d",
        "head.kernel": "16/d 61 | 16 64/t | 16/d 62/t",
    },
    "recipe": {
        "token_embedding.embedding": "61 16/d | 64/t 16 | 64/t 16/d",
        "value_embedding.embedding": "61 16/d | 64/t 16 | 64/t 16/d",
        "value_gates": "2 12 4 | 2 12 4/t | 2 12 4/t",
        "head.kernel": "16/d 61 | 16 64/t | 16/d 64/t",
        "blocks.residual_scale": "3 | 3 | 3",
        "blocks.embedding_skip": "3 | 3 | 3",
        "blocks.attention.query.kernel": "3 16/d 8 2 | 3 16 8/t 2 | 3 16/d 8/t 2",
        "blocks.attention.[kv]*.kernel": "3 16/d 4 2 | 3 16 4/t 2 | 3 16/d 4/t 2",
        "blocks.attention.output.kernel": "3 8 2 16/d | 3 8/t 2 16 | 3 8/t 2 16/d",
        "blocks.feed_forward.up.kernel": "3 16/d 32 | 3 16 32/t | 3 16/d 32/t",
        "blocks.feed_forward.down.kernel": "3 32 16/d | 3 32/t 16 | 3 32/t 16/d",
    },
    "olmo": {
        "token_embedding.embedding": "61 16/d | 64/t 16 | 64/t 16/d",
        "head.kernel": "16/d 61 | 16 64/t | 16/d 64/t",
        "final_norm.scale": "16/d | 16 | 16/d",
        "blocks.*_output_norm.scale": "3 16/d | 3 16 | 3 16/d",
        # a scale for each element of each head
        "blocks.attention.query_norm.scale": "3 8/d 4 | 3 8/t 4 | 3 8/t 4/d",
        "blocks.attention.key_norm.scale": "3 2 4 | 3 2 4 | 3 2 4/d",
        "blocks.attention.query.kernel": "3 16/d 8 4 | 3 16 8/t 4 | 3 16/d 8/t 4",
        "blocks.attention.[kv]*.kernel": "3 16/d 2 4 | 3 16 2 4 | 3 16/d 2 4",
        "blocks.attention.output.kernel": "3 8 4 16/d | 3 8/t 4 16 | 3 8/t 4 16/d",
        "blocks.feed_forward.gate.kernel": "3 16/d 32 | 3 16 32/t | 3 16/d 32/t",
        "blocks.feed_forward.up.kernel": "3 16/d 32 | 3 16 32/t | 3 16/d 32/t",
        "blocks.feed_forward.down.kernel": "3 32 16/d | 3 32/t 16 | 3 32/t 16/d",
    },
    "sinks": {
        "token_embedding.embedding": "61 16/d | 64/t 16 | 64/t 16/d",
        "head.kernel": "16/d 61 | 16 64/t | 16/d 64/t",
        "final_norm.scale": "16/d | 16 | 16/d",
        "blocks.*_norm.scale": "2 16/d | 2 16 | 2 16/d",
        "blocks.attention.sink": "2 8/d | 2 8/t | 2 8/t",
        "blocks.attention.gate.kernel": "2 16/d 8 | 2 16 8/t | 2 16/d 8/t",
        "blocks.attention.gate.bias": "2 8/d | 2 8/t | 2 8/t",
        "blocks.attention.query.kernel": "2 16/d 8 2 | 2 16 8/t 2 | 2 16/d 8/t 2",
        "blocks.attention.query.bias": "2 8/d 2 | 2 8/t 2 | 2 8/t 2/d",
        "blocks.attention.[kv]*.kernel": "2 16/d 4 2 | 2 16 4/t 2 | 2 16/d 4/t 2",
        "blocks.attention.[kv]*.bias": "2 4 2 | 2 4/t 2 | 2 4/t 2/d",
        "blocks.attention.output.kernel": "2 8 2 16/d | 2 8/t 2 16 | 2 8/t 2 16/d",
        "blocks.attention.output.bias": "2 16/d | 2 16 | 2 16/d",
        "blocks.feed_forward.*.kernel": "2 16/d 32 | 2 16 32/t | 2 16/d 32/t",
        "blocks.feed_forward.*.bias": "2 32/d | 2 32/t | 2 32/t",
        "blocks.feed_forward.down.kernel": "2 32 16/d | 2 32/t 16 | 2 32/t 16/d",
        "blocks.feed_forward.down.bias": "2 16/d | 2 16 | 2 16/d",
    },
    "latent": {
        "token_embedding.embedding": "61 16/d | 64/t 16 | 64/t 16/d",
        "head.kernel": "16/d 61 | 16 64/t | 16/d 64/t",
        "final_norm.scale": "16/d | 16 | 16/d",
        "blocks.*_norm.scale": "2 16/d | 2 16 | 2 16/d",
        "blocks.attention.query_latent.down.kernel": "2 16/d 5 | 2 16 5 | 2 16/d 5",
        "blocks.attention.query_latent.norm.scale": "2 5 | 2 5 | 2 5",
        "blocks.attention.query_latent.up.kernel": "2 5 8/d 6 | 2 5 8/t 6 | 2 5 8/t 6/d",
        "blocks.attention.latent.down.kernel": "2 16/d 6 | 2 16 6 | 2 16/d 6",
        "blocks.attention.latent.norm.scale": "2 6 | 2 6 | 2 6/d",
        "blocks.attention.shared_key.kernel": "2 16/d 4 | 2 16 4 | 2 16/d 4",
        "blocks.attention.latent.up.kernel": "2 6 8/d 5 | 2 6 8/t 5 | 2 6/d 8/t 5",
        "blocks.attention.output.kernel": "2 8 3 16/d | 2 8/t 3 16 | 2 8/t 3 16/d",
        "blocks.attention.output.bias": "2 16/d | 2 16 | 2 16/d",
        "blocks.feed_forward.up.kernel": "2 16/d 32 | 2 16 32/t | 2 16/d 32/t",
        "blocks.feed_forward.up.bias": "2 32/d | 2 32/t | 2 32/t",
        "blocks.feed_forward.down.kernel": "2 32 16/d | 2 32/t 16 | 2 32/t 16/d",
        "blocks.feed_forward.down.bias": "2 16/d | 2 16 | 2 16/d",
    },
}
ALL_PLACES = [(architecture, mode) for architecture in MESHES for mode in MESHES[architecture]]


def place_of(architecture: str, mode: str, name: str) -> list[str]:
    """What the table says of a parameter, axis by axis; the last line that fits counts."""
    line = [w for pattern, w in PLACES[architecture].items() if fnmatch.fnmatch(name, pattern)][-1]
    if mode == "dp":  # as in fsdp, but for the splits
        return line.split(" | ")[0].replace("/d", "").split()
    if mode == "cp":
        return line.split(" | ")[0].replace("/d", "/a").split()
    return line.split(" | ")[("fsdp", "tp", "fsdp_tp").index(mode)].split()


def part_of(axis: str, place: tuple[int, ...], mesh: Mesh) -> tuple[int, int]:
    """Where the part of an axis begins and ends that the device in this place has."""
    size, _, over = axis.partition("/")
    number, parts = {
        "": (0, 1),
        "d": (place[0], mesh.shape["data"]),
        "t": (place[1], mesh.axis_sizes[1]),
        "c": (place[1], mesh.axis_sizes[1]),
        "a": (place[0] * mesh.axis_sizes[1] + place[1], mesh.size),
    }[over]
    own = int(size) // parts
    assert own * parts == int(size)
    return number * own, (number + 1) * own


def assert_sharded_as_listed(name: str, array: jax.Array, axes: list[str], mesh: Mesh) -> None:
    """Each device has the part of the array that its place in the mesh tells, and no other."""
    assert array.shape == tuple(int(axis.partition("/")[0]) for axis in axes), name
    shards = {shard.device: shard for shard in array.addressable_shards}
    assert len(shards) == len(array.addressable_shards) == mesh.size
    for place in np.ndindex(mesh.devices.shape):
        shard = shards[mesh.devices[place]]
        parts = [part_of(axis, place, mesh) for axis in axes]
        assert shard.data.shape == tuple(last - first for first, last in parts), name
        told = [
            index.indices(size)[:2] for index, size in zip(shard.index, array.shape, strict=True)
        ]
        assert told == parts, name
        assert shard.data.devices() == {shard.device}


def assert_all_sharded_as_listed(
    architecture: str, mode: str, mesh: Mesh, *modules: nnx.Module | nnx.Optimizer
) -> None:
    """Parameters and both moments, which lie as the parameters do."""
    names = set(named_arrays(modules[0]))
    moments = set()
    for module in modules:
        for name, array in named_arrays(module).items():
            of = name.partition("mu.")[2] or name.partition("nu.")[2] or name
            if of in names:
                assert_sharded_as_listed(name, array, place_of(architecture, mode, of), mesh)
            else:
                assert array.shape == ()
            moments |= {name} if of != name else set()
    assert len(moments) == 2 * len(names) * (len(modules) - 1)


def test_a_mesh_without_devices_is_like_one_with_devices() -> None:
    mesh = abstract_mesh((4, 2), MESH_AXIS_NAMES)
    assert mesh == create_mesh((4, 2)).abstract_mesh.update(abstract_device=mesh.abstract_device)
    assert set(mesh.axis_types) == {AxisType.Auto}


@pytest.mark.parametrize(("architecture", "mode"), ALL_PLACES)
def test_every_array_is_sharded_as_the_mode_says(architecture: str, mode: str) -> None:
    mesh = mesh_of(*MESHES[architecture][mode], mode)
    run = run_of(architecture, mode, mesh)
    weights = random_weights(run, mesh)
    for name, array in weights.items():
        assert_sharded_as_listed(name, array, place_of(architecture, mode, name), mesh)
    state = AbstractState(run, 1, mesh)
    for name in weights:
        for found in moments_of(name, state):
            assert found.sharding == weights[name].sharding


def moments_of(name: str, state: AbstractState) -> list[jax.ShapeDtypeStruct]:
    found = [
        value
        for key, value in state.optimizer.items()
        if key.endswith((f"mu.{name}", f"nu.{name}"))
    ]
    assert len(found) == 2
    return found


@pytest.mark.parametrize("architecture", MESHES)
def test_on_accelerators_dp_shards_the_moments_of_whole_weights_as_fsdp(architecture: str) -> None:
    mesh = mesh_of(*MESHES[architecture]["dp"])
    run = run_of(architecture, "dp", mesh)
    with trace_for(Target("gpu")):
        state = AbstractState(run, 1, mesh)
    for name, like in state.weights.items():
        assert like.sharding == NamedSharding(mesh, P())
        for found in moments_of(name, state):
            moments = jax.device_put(np.zeros(found.shape), found.sharding)
            assert_sharded_as_listed(name, moments, place_of(architecture, "fsdp", name), mesh)


@pytest.mark.parametrize(
    ("mode", "mesh", "axes", "shape", "spec"),
    [
        # heads that do not divide are no matter where their width does
        ("fsdp", (8, 1), ("heads", "head_dim"), (2, 12, 64), P(None, None, "data")),
        ("fsdp", (8, 1), ("heads", "head_dim"), (2, 16, 64), P(None, None, "data")),
        ("fsdp", (8, 1), ("heads", "head_dim"), (2, 16, 4), P(None, "data")),
        ("fsdp", (8, 1), ("kv_heads", "head_dim"), (2, 12, 4), P()),
        ("fsdp", (8, 1), ("emb", "ffn"), (2, 12, 64), P(None, None, "data")),
        ("fsdp", (8, 1), ("emb", "ffn"), (2, 16, 64), P(None, "data")),
        ("fsdp_tp", (2, 4), ("heads", "head_dim"), (2, 12, 64), P(None, "tensor", "data")),
        ("fsdp_tp", (2, 4), ("kv_heads", "head_dim"), (2, 2, 64), P(None, None, "data")),
        ("fsdp_tp", (2, 4), ("ffn", "emb"), (2, 64, 16), P(None, "tensor", "data")),
        ("tp", (1, 4), ("vocab", "emb"), (64, 16), P("tensor")),
        ("dp", (8, 1), ("emb", "ffn"), (2, 16, 64), P()),
        ("fsdp", (1, 1), ("emb", "ffn"), (2, 16, 64), P()),
        ("cp", (2, 4), ("emb", "ffn"), (2, 16, 64), P(None, ("data", "context"))),
        ("cp", (2, 4), ("emb", "ffn"), (2, 12, 64), P(None, None, ("data", "context"))),
        ("cp", (1, 8), ("heads", "head_dim"), (2, 16, 4), P(None, "context")),
    ],
)
def test_a_mesh_axis_splits_the_first_axis_in_the_table_that_it_divides(
    mode: Mode,
    mesh: tuple[int, int],
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    spec: PartitionSpec,
) -> None:
    assert Layout(mesh_of(*mesh, mode), mode).spec(axes, shape) == spec


@pytest.mark.parametrize(
    ("architecture", "mode"),
    [
        ("experts", "fsdp_tp"),
        ("no-layers", "fsdp"),
        ("no-layers", "tp"),
        pytest.param("llama", "cp", marks=pytest.mark.long),
    ],
)
def test_model_and_optimizer_are_created_sharded_with_the_values_of_one_device(
    architecture: str, mode: str
) -> None:
    mesh = mesh_of(*MESHES[architecture][mode], mode)
    run = run_of(architecture, mode, mesh)
    model, optimizer = create_model_and_optimizer(run, 1, mesh)
    assert_all_sharded_as_listed(architecture, mode, mesh, model, optimizer)
    alone = named_arrays(GPT(run.model, jax.random.key(run.train.seed)))
    for name, array in named_arrays(model, run.model.vocab_size).items():
        np.testing.assert_allclose(array, alone[name], rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("mode", "data", "tensor"), [("dp", 8, 1), ("fsdp", 4, 1), ("tp", 1, 8), ("fsdp_tp", 4, 2)]
)
def test_a_batch_is_split_along_data_and_replicated_along_tensor(
    mode: str, data: int, tensor: int
) -> None:
    mesh = mesh_of(data, tensor)
    inputs, targets = step_batch(2)
    for whole, array in zip((inputs, targets), place_batch(mesh, inputs, targets), strict=True):
        assert_sharded_as_listed("batch", array, ["2", "8/d", str(LENGTH)], mesh)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
    assert process_local_rows(mesh, 8).tolist() == list(range(8))
    assert Layout(mesh, mode).batch_spec(3) == Layout(mesh).batch_spec(3)  # type: ignore[arg-type]


def test_cp_splits_rows_along_data_and_tokens_along_context() -> None:
    mesh = mesh_of(2, 4, "cp")
    inputs, targets = step_batch(2)
    for whole, array in zip((inputs, targets), place_batch(mesh, inputs, targets), strict=True):
        assert_sharded_as_listed("batch", array, ["2", "8/d", f"{LENGTH}/c"], mesh)
        for shard in array.addressable_shards:
            np.testing.assert_array_equal(shard.data, whole[shard.index])
    assert process_local_rows(mesh, 8).tolist() == list(range(8))


def test_without_a_mesh_everything_is_on_the_first_device() -> None:
    train = train_config(sharding=ShardingConfig(mode="fsdp"))
    run = RunConfig(model_config(n_layers=0, n_heads=None), train)
    for module in create_model_and_optimizer(run, 1):
        for name, array in named_arrays(module).items():
            assert array.devices() == {jax.devices()[0]}, name


def test_each_mode_has_its_table_and_other_names_are_refused() -> None:
    assert MESH_AXES["dp"] == {}
    assert set(MESH_AXES["fsdp"].values()) == {"data"}
    assert set(MESH_AXES["tp"].values()) == {"tensor"}
    assert set(MESH_AXES["fsdp_tp"].values()) == {"data", "tensor"}
    assert set(MESH_AXES["cp"].values()) == {("data", "context")}
    with pytest.raises(ValueError, match="'zero3' must be one of dp, fsdp, tp, fsdp_tp, cp"):
        validate_mesh_for_mode(mesh_of(1), "zero3")


@pytest.mark.parametrize(
    ("mode", "data", "tensor", "problem"),
    [
        ("dp", 4, 2, "'dp' needs tensor 1, not 2"),
        ("fsdp_tp", 1, 8, "'fsdp_tp' needs data and tensor of at least 2, not 1 and 8"),
        ("cp", 8, 1, "'cp' needs context of at least 2; or use mode 'fsdp'"),
    ],
)
def test_a_mesh_that_does_not_fit_the_mode_is_refused(
    mode: Mode, data: int, tensor: int, problem: str
) -> None:
    mesh = mesh_of(data, tensor, mode)
    with pytest.raises(ValueError, match=problem):
        validate_mesh_for_mode(mesh, mode)
    sharding = ShardingConfig.model_construct(mode=mode, data=None, tensor=None)
    with pytest.raises(ValueError, match=problem):
        Layout.of(sharding, mesh)
    run = RunConfig(model_config(), train_config().model_copy(update={"sharding": sharding}))
    with pytest.raises(ValueError, match=problem):
        create_model_and_optimizer(run, 1, mesh)
    # what train.json says is refused before there is a mesh
    with pytest.raises(ValueError, match=problem):
        ShardingConfig.of(mode, (data, tensor))


def test_a_mesh_of_other_axes_is_refused() -> None:
    devices = np.array(jax.devices()).reshape(4, 2)
    other = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ValueError, match=r"the axes .*model"):
        validate_mesh_for_mode(other, "dp")
    with pytest.raises(ValueError, match=r"the axes .*tensor.*; mode 'cp' needs .*context"):
        validate_mesh_for_mode(mesh_of(2, 4), "cp")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((8, 1), (8, 1)), ((-1, 2), (4, 2)), ((1, -1), (1, 8)), ((-1, 8), (1, 8)), ((2, 4), (2, 4))],
)
def test_a_mesh_uses_all_devices(shape: tuple[int, int], expected: tuple[int, int]) -> None:
    mesh = create_mesh(shape)
    assert (mesh.axis_names, mesh.devices.shape) == (MESH_AXIS_NAMES, expected)
    assert set(mesh.devices.flat) == set(jax.devices())
    assert len(set(mesh.devices.flat)) == mesh.devices.size


def test_neighboring_devices_are_along_tensor() -> None:
    assert [[d.id for d in row] for row in create_mesh((2, 4)).devices] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]


@pytest.mark.parametrize(
    ("shape", "problem"),
    [
        ((3, 2), "data 3 × tensor 2 needs 6 devices; there are 8"),
        ((16, 1), "needs 16 devices; there are 8"),
        ((-1, -1), "at least 1, or −1 once"),
        ((0, 8), "at least 1"),
        ((-2, 4), "at least 1"),
        ((-1, 3), "3 does not divide the 8 devices"),
        ((-1, 16), "16 does not divide the 8 devices"),
    ],
)
def test_mesh_sizes_that_do_not_multiply_to_the_devices_are_refused(
    shape: tuple[int, int], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        create_mesh(shape)


UNEVEN = {"emb_dim": 12, "n_heads": 6, "n_kv_heads": 3, "ffn_dim": 20}


@pytest.mark.parametrize(
    ("mode", "mesh", "model", "problems"),
    [
        ("dp", (8, 1), UNEVEN, []),
        ("fsdp", (8, 1), {"emb_dim": 12, "n_heads": 8, "head_dim": 2, "ffn_dim": 16}, [
            "emb_dim: 12 is not divisible by the 8 devices of sharding.data; use 8 or 16",
        ]),
        ("fsdp", (8, 1), {**UNEVEN, "emb_dim": 24}, []),  # GPT-2's 12 heads, say: emb_dim divides
        ("tp", (1, 4), UNEVEN, [
            "n_heads: 6 is not divisible by the 4 devices of sharding.tensor; use 4 or 8",
            "n_kv_heads: 3 is not divisible by the 4 devices of sharding.tensor; use 4",
        ]),
        ("tp", (1, 8), {"emb_dim": 17, "n_heads": 1}, [
            "n_heads: 1 is not divisible by the 8 devices of sharding.tensor; use 8",
            "ffn_dim (4 × emb_dim): 68 is not divisible by the 8 devices of sharding.tensor;"
            " use 64 or 72",
        ]),
        ("tp", (1, 8), {"n_heads": 8, "n_kv_heads": 2}, []),
        ("fsdp_tp", (4, 2), {**UNEVEN, "emb_dim": 18}, [
            "emb_dim: 18 is not divisible by the 4 devices of sharding.data; use 16 or 20",
            "n_kv_heads: 3 is not divisible by the 2 devices of sharding.tensor; use 2 or 4",
        ]),
        ("fsdp", (8, 1), {"emb_dim": 12, "n_layers": 0, "n_heads": None}, [
            "emb_dim: 12 is not divisible by the 8 devices of sharding.data; use 8 or 16",
        ]),
        ("fsdp_tp", (2, 4), {"n_heads": 4, "feed_forward": "none"}, []),
        ("cp", (2, 4), {"emb_dim": 12, "n_heads": 6, "n_kv_heads": 3}, [
            "emb_dim: 12 is not divisible by the 8 devices of sharding.data × sharding.context;"
            " use 8 or 16",
            "n_heads: 6 is not divisible by the 4 devices of sharding.context; use 4 or 8",
            "n_kv_heads: 3 is not divisible by the 4 devices of sharding.context; use 4",
        ]),
        ("cp", (1, 8), {"n_heads": 8, "n_kv_heads": 2, "ffn_dim": 15}, []),
    ],
)  # fmt: skip
def test_an_indivisible_dimension_is_reported_with_the_nearest_multiples(
    mode: Mode, mesh: tuple[int, int], model: dict[str, Any], problems: list[str]
) -> None:
    layout, config = Layout(mesh_of(*mesh, mode), mode), model_config(**model)
    assert layout.problems(config) == problems
    if problems:
        sharding = ShardingConfig.of(mode, mesh).model_dump()
        run = RunConfig(config, train_config(microbatch_size=8, sharding=sharding))
        with pytest.raises(ValueError, match="is not divisible") as raised:
            create_model_and_optimizer(run, 1, layout.mesh)
        assert str(raised.value).splitlines() == problems

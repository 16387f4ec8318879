"""The compiled step of each mode: what its devices say to each other, where its arrays stay, what
it trains, and what memory it takes.

L layers and A microbatches of B sequences, of S tokens, D wide, as in `model.py`; B is what one
device has.
"""

import functools
import math
import re
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import Mode
from rungs.model.gpt import GPT
from rungs.objectives.next_token import NextToken
from rungs.objectives.table import make_train_step
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import Layout, place_batch
from rungs.parallel.target_device import Target, trace_for
from rungs.planning.program import Collective, axes_of, collectives
from rungs.step.eval_step import make_evaluation_step
from rungs.step.gradients import summed_gradients
from rungs.step.state import AbstractState, Arrays, create_model_and_optimizer, named_arrays
from rungs.step.train_step import StepResult
from tests.parallel.test_gradients import KEY, on_mesh
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.sharded_models import (
    LENGTH,
    SEQUENCES,
    TOKENS,
    TOTAL_STEPS,
    assert_close,
    random_weights,
    run_of,
    step_batch,
    total_bytes,
)
from tests.support.tiny_model import bind_and_jit

L, A, S, D = 3, 2, LENGTH, 16
MESHES = {
    "one": (1, 1),
    "dp": (8, 1),
    "zero": (8, 1),  # dp as on accelerators
    "fsdp": (8, 1),
    "tp": (1, 4),
    "fsdp_tp": (2, 4),
    "cp": (2, 4),
}
MODES = ["dp", "zero", "fsdp", "tp", "fsdp_tp", "cp"]
FEW = 200
"""Bytes of what is no array of the model and no activation: losses, weights, flags and norms."""


class Trained(NamedTuple):
    """A llama after two steps in a mode."""

    run: RunConfig
    mesh: Mesh
    model: GPT
    optimizer: SkippingOptimizer
    results: list[StepResult]
    sent: list[Collective]
    at_first: dict[str, Any]

    def sent_over(self, kind: str, *axes: str) -> list[Collective]:
        return [
            one for one in self.sent if one.kind == kind and axes_of(one.groups, self.mesh) == axes
        ]

    @property
    def kinds(self) -> set[tuple[str, tuple[str, ...]]]:
        """Of what is more than a few numbers."""
        return {
            (one.kind, axes_of(one.groups, self.mesh))
            for one in self.sent
            if one.operand_bytes > FEW
        }


def total(sent: list[Collective]) -> int:
    """Bytes of all operands of one device in one step; of an all-gather, results."""
    return sum(one.trips * max(one.operand_bytes, one.result_bytes) for one in sent)


@functools.cache
def trained(name: str) -> Trained:
    with trace_for(Target("gpu") if name == "zero" else None):
        return trained_here(name)


def trained_here(name: str) -> Trained:
    mode = "dp" if name in ("one", "zero") else name
    mesh = mesh_of(*MESHES[name], mode)
    # a large epsilon: else Adam divides by gradients that are next to nothing but rounding
    run = run_of(
        "even-llama",
        mode,
        mesh,
        drop_rate=0.2,
        gradient_accumulation_steps=A,
        clipping_max_norm=0.5,
        weight_decay=0.5,
        decayed_parameters="all",
        epsilon=1e-3,
    )
    weights = random_weights(run, mesh)
    promised = {name: parts_of(array) for name, array in weights.items()}
    model, optimizer = create_model_and_optimizer(run, TOTAL_STEPS, mesh, weights)
    at_first = placement(model) | placement(optimizer)
    assert at_first.items() >= promised.items()
    batch = place_batch(mesh, *step_batch(A))
    program = make_train_step(run.train, mesh).lower(model, optimizer, *batch).compile()  # type: ignore[attr-defined]
    results = [jax.device_get(program(model, optimizer, *batch)) for _ in range(2)]
    sent = collectives(program.compiled)
    return Trained(run, mesh, model, optimizer, results, sent, at_first)


def placement(module: nnx.Module | nnx.Optimizer) -> dict[str, Any]:
    return {name: parts_of(array) for name, array in named_arrays(module).items()}


def parts_of(array: jax.Array) -> dict[jax.Device, Any]:
    """Which part of an array each device has."""
    return {shard.device: (shard.index, shard.data.shape) for shard in array.addressable_shards}


def is_divided(array: jax.Array) -> bool:
    """Whether the devices along data, and in cp along context, have each a part of its own."""
    assert isinstance(array.sharding, NamedSharding)
    return any("data" in (over or ()) for over in array.sharding.spec)


def divided(one: Trained, pattern: str) -> int:
    """Bytes that the devices along data, and in cp along context, have together of the parameters
    whose names fit, where each has a part of its own."""
    devices = one.mesh.shape["data"] * one.mesh.shape.get("context", 1)
    return sum(
        devices * array.addressable_shards[0].data.nbytes
        for name, array in named_arrays(one.model).items()
        if re.search(pattern, name) and is_divided(array)
    )


def floats(module: GPT | SkippingOptimizer) -> dict[str, np.ndarray]:
    """All but the counts of steps."""
    arrays = named_arrays(module, TOKENS)
    return {name: np.asarray(array) for name, array in arrays.items() if array.ndim}


@pytest.mark.long
@pytest.mark.parametrize("mode", MODES)
def test_a_step_has_the_results_of_one_device_and_keeps_its_arrays_where_they_are(
    mode: str,
) -> None:
    alone, shared = trained("one"), trained(mode)
    assert placement(shared.model) | placement(shared.optimizer) == shared.at_first
    for expected, found in zip(alone.results, shared.results, strict=True):
        np.testing.assert_allclose(found.losses_A, expected.losses_A, rtol=1e-5)
        np.testing.assert_allclose(found.weights_A, expected.weights_A, rtol=1e-6)
        assert found.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
        assert found.clipped
        assert found.finite_A.tolist() == [True] * A
    # rounding as in test_gradients; the second moments are of squares, which doubles it
    assert_close(floats(shared.model), floats(alone.model), within=2e-4)
    assert_close(floats(shared.optimizer), floats(alone.optimizer), within=2e-4)


def bytes_on(device: jax.Device, arrays: Arrays) -> int:
    return sum(
        shard.data.nbytes
        for array in arrays.values()
        for shard in array.addressable_shards
        if shard.device == device
    )


@pytest.mark.parametrize("mode", ["fsdp", pytest.param("cp", marks=pytest.mark.long)])
def test_fsdp_and_cp_keep_an_eighth_of_everything_on_each_device(mode: str) -> None:
    one = trained(mode)
    for arrays in (named_arrays(one.model), named_arrays(one.optimizer)):
        for device in one.mesh.devices.flat:
            assert bytes_on(device, arrays) <= 1.02 * total_bytes(arrays) / 8


@pytest.mark.long
def test_on_accelerators_dp_keeps_whole_weights_and_an_eighth_of_the_moments() -> None:
    one = trained("zero")
    moments, weights = named_arrays(one.optimizer), named_arrays(one.model)
    for device in one.mesh.devices.flat:
        assert bytes_on(device, weights) == total_bytes(weights)
        assert bytes_on(device, moments) <= 1.02 * total_bytes(moments) / 8


@pytest.mark.long
def test_vocabulary_padding_stays_zero_and_is_not_in_named_arrays() -> None:
    one = trained("fsdp_tp")
    moments = [name for name in named_arrays(one.optimizer) if "token_embedding" in name]
    assert len(moments) == 2
    whole_arrays = named_arrays(one.model) | named_arrays(one.optimizer)
    told_arrays = named_arrays(one.model, TOKENS) | named_arrays(one.optimizer, TOKENS)
    for name in ("token_embedding.embedding", *moments):
        whole, told = whole_arrays[name], told_arrays[name]
        assert (whole.shape, told.shape) == ((64, D), (TOKENS, D))
        assert np.count_nonzero(np.asarray(whole)[TOKENS:]) == 0
        assert np.count_nonzero(told) > 0
        np.testing.assert_array_equal(told, np.asarray(whole)[:TOKENS])
    assert AbstractState(one.run, 1, one.mesh).shapes["token_embedding.embedding"] == (TOKENS, D)


@pytest.mark.long
@pytest.mark.parametrize("mode", ["fsdp_tp", "cp"])
def test_a_sharded_model_has_logits_and_validation_loss_of_one_device(mode: str) -> None:
    alone, shared = trained("one"), trained(mode)
    inputs_BS, targets_BS = (part[0] for part in step_batch(1))
    expected, logits_BSV = (
        np.asarray(bind_and_jit(GPT.__call__, one.model)(inputs_BS)) for one in (alone, shared)
    )
    assert logits_BSV.shape == (SEQUENCES, S, TOKENS)
    np.testing.assert_allclose(logits_BSV, expected, atol=1e-3 * np.abs(expected).max())
    train = shared.run.train
    evaluation_step = make_evaluation_step(NextToken(train), train, shared.mesh)
    loss_B, count_B = evaluation_step(
        shared.model, *place_batch(shared.mesh, inputs_BS, targets_BS)
    )
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(expected, targets_BS % TOKENS)
    counts_BS = targets_BS >= 0
    np.testing.assert_allclose(loss_B, (losses_BS * counts_BS).sum(axis=-1), rtol=1e-4)
    assert count_B.tolist() == counts_BS.sum(axis=-1).tolist()


def test_dp_sums_the_gradients_once_a_step_and_sends_nothing_else() -> None:
    one = trained("dp")
    assert one.kinds == {("all-reduce", ("data",))}
    (gradients,) = (c for c in one.sent if c.operand_bytes > FEW)
    assert gradients.trips == 1
    assert gradients.operand_bytes == total_bytes(named_arrays(one.model))


@pytest.mark.long
def test_on_accelerators_dp_scatters_gradients_and_gathers_weights_once_a_step() -> None:
    one = trained("zero")
    assert one.kinds == {("reduce-scatter", ("data",)), ("all-gather", ("data",))}
    weights, moments = named_arrays(one.model), named_arrays(one.optimizer)
    whole = sum(
        array.nbytes
        for name, array in weights.items()
        if not any(is_divided(moment) for of, moment in moments.items() if of.endswith(name))
    )
    for kind in ("reduce-scatter", "all-gather"):
        assert total(one.sent_over(kind, "data")) == total_bytes(weights) - whole
    assert 0 <= total(one.sent_over("all-reduce", "data")) - whole <= FEW


def assert_weights_are_gathered_and_gradients_scattered(one: Trained, *axes: str) -> None:
    """Of each microbatch every layer's weights are gathered before the layer, and again before they
    are needed in the backward pass. Each gradient is summed into parts. What is outside of the
    layers is gathered once a step. Devices that have columns of the embedding also exchange token
    ids, and float32 rows forward and back."""
    matrices, norms = divided(one, "^blocks.*kernel"), divided(one, "^blocks.*scale")
    outside = divided(one, "^(?!blocks)")
    assert matrices > 10 * norms > 0 < outside
    devices = math.prod(one.mesh.shape[axis] for axis in axes)
    ids = 4 * SEQUENCES * S // devices
    gathered = 2 * A * (matrices + norms) + outside + ids * devices
    assert total(one.sent_over("all-gather", *axes)) == gathered
    assert total(one.sent_over("all-to-all", *axes)) == 2 * ids * D
    summed = A * (matrices + norms + outside)
    assert total(one.sent_over("reduce-scatter", *axes)) == summed


def test_fsdp_sends_weights_and_their_gradients_and_nothing_else() -> None:
    one = trained("fsdp")
    assert one.kinds == {
        ("all-gather", ("data",)),
        ("reduce-scatter", ("data",)),
        ("all-to-all", ("data",)),
    }
    assert_weights_are_gathered_and_gradients_scattered(one, "data")
    arrays = named_arrays(one.model)
    # which are four wide, so that eight devices cannot divide them
    norms = [f"blocks.attention.{name}_norm.scale" for name in ("query", "key")]
    assert [name for name, array in arrays.items() if not is_divided(array)] == sorted(norms)
    whole = sum(arrays[name].nbytes for name in norms)
    assert 0 <= total(one.sent_over("all-reduce", "data")) - whole <= FEW


def assert_activations_are_summed(one: Trained) -> None:
    """Of each microbatch two in each layer forth and two back, one of the embedding, one back from
    the head, and three numbers for each token of the loss; and the gradients of what each device
    has whole but uses for its own heads only."""
    tokens = SEQUENCES // A // one.mesh.shape["data"] * S
    shared = sum(
        array.nbytes
        for name, array in named_arrays(one.model).items()
        if re.search("(query|key)_norm|(key|value).kernel", name)
    )
    expected = A * (4 * tokens * (D * (4 * L + 2) + 3) + shared)
    assert 0 <= total(one.sent_over("all-reduce", "tensor")) - expected <= FEW


@pytest.mark.long
def test_tp_sums_activations_along_tensor_and_gathers_nothing() -> None:
    one = trained("tp")
    assert one.kinds == {("all-reduce", ("tensor",))}
    assert_activations_are_summed(one)


@pytest.mark.long
def test_fsdp_tp_sends_what_both_do_each_along_its_axis() -> None:
    one = trained("fsdp_tp")
    assert one.kinds == {
        ("all-gather", ("data",)),
        ("reduce-scatter", ("data",)),
        ("all-to-all", ("data",)),
        ("all-reduce", ("tensor",)),
    }
    assert_weights_are_gathered_and_gradients_scattered(one, "data")
    assert_activations_are_summed(one)


@pytest.mark.long
def test_cp_sends_what_fsdp_does_over_all_devices_and_exchanges_tokens_for_heads() -> None:
    """Of each microbatch and layer 8 heads of queries and of results, and of keys and values one
    for each device: forward, again in the backward pass, and the gradients back."""
    one = trained("cp")
    assert one.kinds == {
        ("all-gather", ("data", "context")),
        ("reduce-scatter", ("data", "context")),
        ("all-to-all", ("data", "context")),
        ("all-to-all", ("context",)),
    }
    assert_weights_are_gathered_and_gradients_scattered(one, "data", "context")
    tokens, head_bytes, context = SEQUENCES // A * S // one.mesh.size, 4 * 4, 4
    exchanged = tokens * head_bytes * (8 + context + context + 8)
    assert total(one.sent_over("all-to-all", "context")) == A * L * 3 * exchanged


@pytest.mark.long
def test_experts_are_all_reduced_like_any_feed_forward_part() -> None:
    """And the gradients of the routing probabilities, one for each token and expert of it, and of
    the experts' last biases."""
    one = on_mesh("experts", "fsdp_tp", 4, 2)
    batch = place_batch(one.layout.mesh, *step_batch(1))
    program = jax.jit(one.compiled).lower(nnx.state(one.model), *batch, KEY).compile()
    sent = [c for c in collectives(program) if axes_of(c.groups, one.layout.mesh) == ("tensor",)]
    layers, tokens, n_experts, each = 2, SEQUENCES // 4 * S, 4, 2
    activations = tokens * (D * (4 * layers + 2) + 3)
    assert total(sent) == 4 * (activations + layers * (tokens * each + n_experts * D))


def memory(mode: Mode, devices: int, remat: str, **model: Any) -> tuple[int, int]:
    """Temporary bytes of a device while gradients of one microbatch are computed, and bytes of all
    parameters together."""
    sizes = {"emb_dim": 32, "n_heads": 8, "n_layers": 12, "context_length": 64, "norm": "none"}
    sharding = {"mode": mode, "data": devices}
    train = train_config(sharding=sharding, microbatch_size=8, remat=remat)
    run, layout = RunConfig(model_config(**sizes | model), train), Layout(mesh_of(devices), mode)
    state = AbstractState(run, 1, layout.mesh)
    abstract, optimizer = state.fill(cast(Arrays, state.weights), cast(Arrays, state.optimizer))
    graph, weights = nnx.split(abstract)
    place = NamedSharding(layout.mesh, layout.batch_spec(3))
    batch = jax.ShapeDtypeStruct((1, 8, run.model.context_length), jnp.int32, sharding=place)

    def of(weights: nnx.State, inputs: jax.Array, targets: jax.Array, key: jax.Array) -> Any:
        model, wrt, microbatches = nnx.merge(graph, weights), optimizer.wrt, len(inputs)
        parts = NextToken(train), train, layout, model, wrt, microbatches
        return summed_gradients(*parts)((inputs, targets), key, None)

    program = jax.jit(of).lower(weights, batch, batch, jax.random.key(0)).compile()
    used = program.memory_analysis()
    assert used is not None
    return used.temp_size_in_bytes, sum(4 * like.size for like in state.weights.values())


@pytest.mark.long
def test_more_remat_takes_less_memory() -> None:
    settings = "none", "activations", "dots", "full"
    none, activations, dots, full = (memory("dp", 1, remat)[0] for remat in settings)
    assert full < dots / 2
    assert dots < activations
    assert activations < 0.85 * none


@pytest.mark.long
def test_fsdp_gathers_only_a_layer_or_two_at_a_time() -> None:
    """So many layers are wide that activations are little beside weights. Each device has an eighth
    of parameters and gradients, and what is gathered goes again."""
    temporary, whole = memory("fsdp", 8, "none", emb_dim=64, n_layers=32, context_length=2)
    assert temporary < 0.6 * whole

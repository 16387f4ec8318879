"""Every mode, on every mesh, has the loss, the gradients and the routing of one device.

The reference is `jax.grad` of optax's cross-entropy over the model on one device, all sequences at
once, without `jax.shard_map`, microbatches, recomputation or unrolling. The modes differ in those
too, so that all of them are compared with it in a few compilations.
"""

import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from rungs.config.run_config import RunConfig
from rungs.model.feed_forward import Routing
from rungs.model.gpt import GPT
from rungs.model.layers import Dropout
from rungs.objectives.next_token import NextToken
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import Layout, place_batch
from rungs.parallel.target_device import Target, trace_for
from rungs.step.gradients import Summed, summed_gradients
from rungs.step.nonfinite import ALL_FINITE, checked_names
from rungs.step.state import AbstractState
from tests.support.configs import mesh_of
from tests.support.sharded_models import (
    RARE,
    SEQUENCES,
    arrays_of,
    assert_close,
    random_model_and_optimizer,
    run_of,
    step_batch,
)

ROUNDING = 1e-4
"""Share of an array's largest element. Weights that change by float32's rounding, 6e-8, change the
gradients of the llama here by up to 3e-5 and those of the others by 2e-6; a device's sum that is
missing or counted twice changes them by some hundredths."""
KEY = jax.random.key(3)
EMBEDDING = "the gradient of token_embedding.embedding"
EVERY_PROJECTION = {
    "lora": {
        "rank": 3,
        "alpha": 6.0,
        "targets": ["query", "key", "value", "output", "gate", "up", "down"],
    },
    "start_from": "imported",
}
TRAININGS: dict[str, dict[str, Any]] = {
    "gpt2": {"drop_rate": 0.3},
    "llama": {},
    "even-llama-low-rank": {"drop_rate": 0.3, **EVERY_PROJECTION},
    "experts": {"drop_rate": 0.3, "load_balancing_weight": 1.0},
    "no-layers": {"drop_rate": 0.3},
    "recipe": {"drop_rate": 0.3},
    "olmo": {},
    "latent": {"drop_rate": 0.3},
    "deepseek": {"drop_rate": 0.3},
    "sinks": {},
    "hybrid": {"drop_rate": 0.3},
}


class Outcome(NamedTuple):
    gradients: dict[str, np.ndarray]
    losses_A: np.ndarray
    weights_A: np.ndarray
    routing: Routing | None


def run_in(architecture: str, mode: str, mesh: Mesh, **train: Any) -> RunConfig:
    base = architecture.removesuffix("-low-rank")
    return run_of(base, mode, mesh, **TRAININGS[architecture] | train)


@functools.cache
def expected(architecture: str, accumulation: int, seen: int = SEQUENCES) -> Outcome:
    """Of the first `seen` sequences of the step; the targets of the others do not count."""
    trained, frozen, grad_of = reference(architecture)
    inputs_BS, targets_BS = (part[0] for part in step_batch(1))
    targets_BS = np.where(np.arange(SEQUENCES)[:, None] < seen, targets_BS, -1)
    gradient, (losses_BS, routing) = grad_of(trained, frozen, inputs_BS, targets_BS)
    shapes = AbstractState(run_in(architecture, "dp", mesh_of(1)), 1).shapes
    counts_A = (targets_BS >= 0).reshape(accumulation, -1).mean(axis=-1)
    return Outcome(
        {name: accumulation * array for name, array in arrays_of(gradient, shapes).items()},
        np.asarray(losses_BS).reshape(accumulation, -1).mean(axis=-1),
        counts_A,
        routing,
    )


@functools.cache
def reference(architecture: str) -> tuple[nnx.State, nnx.State, Callable[..., Any]]:
    run = run_in(architecture, "dp", mesh_of(1))
    model, optimizer = random_model_and_optimizer(run, mesh_of(1))
    graph, *states = nnx.split(model, optimizer.wrt, ...)
    trained, frozen = states

    def objective(
        trained: nnx.State, frozen: nnx.State, inputs_BS: jax.Array, targets_BS: jax.Array
    ) -> Any:
        model = nnx.merge(graph, trained, frozen)
        dropout = Dropout.of(run.train.drop_rate, KEY, jnp.arange(SEQUENCES))
        logits_BSV, routing, _ = model.forward(inputs_BS, dropout)
        assert logits_BSV.shape[-1] == run.model.vocab_size
        losses_BS = optax.softmax_cross_entropy_with_integer_labels(
            logits_BSV, jnp.maximum(targets_BS, 0)
        )
        losses_BS = jnp.where(targets_BS >= 0, losses_BS, 0)
        balance = 0 if routing is None else routing.balance_loss.mean()
        weighed = run.train.load_balancing_weight * balance * (targets_BS >= 0).mean()
        return losses_BS.mean() + weighed, (losses_BS, routing)

    return trained, frozen, jax.jit(jax.grad(objective, has_aux=True))


class OnMesh(NamedTuple):
    """A model on a mesh, with the compiled function of its gradients."""

    run: RunConfig
    layout: Layout
    model: GPT
    optimizer: SkippingOptimizer
    compiled: Callable[..., Summed]

    def gradients(self, inputs_ABS: np.ndarray, targets_ABS: np.ndarray) -> Any:
        batch = place_batch(self.layout.mesh, inputs_ABS, targets_ABS)
        return self.compiled(nnx.state(self.model), *batch, KEY)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return AbstractState(self.run, 1, self.layout.mesh).shapes


@functools.cache
def on_mesh(architecture: str, mode: str, data: int, last: int, *train: Any) -> OnMesh:
    mesh = mesh_of(data, last, mode)
    run = run_in(architecture, mode, mesh, **dict(train))
    layout = Layout.of(run.train.sharding, mesh)
    model, optimizer = random_model_and_optimizer(run, mesh)
    graph, wrt = nnx.graphdef(model), optimizer.wrt

    def of(
        state: nnx.State, inputs_ABS: jax.Array, targets_ABS: jax.Array, key: jax.Array
    ) -> Summed:
        model, microbatches = nnx.merge(graph, state), len(inputs_ABS)
        parts = NextToken(run.train), run.train, layout, model, wrt, microbatches
        return summed_gradients(*parts)((inputs_ABS, targets_ABS), key, None)

    return OnMesh(run, layout, model, optimizer, jax.jit(of))


def outcome(one: OnMesh, accumulation: int) -> Outcome:
    gradient, aux, first_nonfinite_A = one.gradients(*step_batch(accumulation))
    assert first_nonfinite_A.tolist() == [ALL_FINITE] * accumulation
    found = arrays_of(gradient, one.shapes)
    return Outcome(found, np.asarray(aux.loss), np.asarray(aux.weight), aux.routing)


FULL, DOTS = ("remat", "full"), ("remat", "dots")
TWICE, THRICE = ("scan_unroll", 2), ("scan_unroll", 3)
CASES: list[tuple[str, str, int, int, int, tuple[Any, ...]]] = [
    # architecture, mode, data, tensor or context, microbatches, keys of train.json
    ("gpt2", "dp", 8, 1, 2, (DOTS,)),
    ("even-llama-low-rank", "fsdp_tp", 2, 4, 1, (DOTS, TWICE)),
    ("experts", "fsdp", 8, 1, 1, (DOTS,)),
    ("no-layers", "fsdp_tp", 4, 2, 2, ()),
    ("recipe", "tp", 1, 8, 2, (FULL,)),
    ("olmo", "fsdp_tp", 4, 2, 2, (DOTS,)),
    ("llama", "cp", 2, 4, 1, ()),
    ("hybrid", "fsdp_tp", 2, 4, 2, (DOTS,)),
    ("hybrid", "cp", 2, 2, 1, (FULL,)),
    ("latent", "fsdp_tp", 2, 4, 1, (DOTS,)),
    ("deepseek", "cp", 2, 2, 1, (DOTS,)),
    ("sinks", "cp", 2, 4, 1, (FULL,)),
]

QUICK = {"no-layers-fsdp_tp-4x2", "llama-cp-2x4", "olmo-fsdp_tp-4x2"}
QUICK |= {"latent-fsdp_tp-2x4"}
"""Not long."""


@pytest.mark.parametrize(
    ("architecture", "mode", "data", "last", "accumulation", "train"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.long)
        for case in CASES
        for name in ["{}-{}-{}x{}".format(*case)]
    ],
)
def test_the_gradient_of_every_parameter_is_that_of_one_device(
    architecture: str, mode: str, data: int, last: int, accumulation: int, train: Any
) -> None:
    found = outcome(on_mesh(architecture, mode, data, last, *train), accumulation)
    wanted = expected(architecture, accumulation)
    assert_close(found.gradients, wanted.gradients, ROUNDING)
    np.testing.assert_allclose(found.losses_A, wanted.losses_A, rtol=1e-6)
    np.testing.assert_allclose(found.weights_A, wanted.weights_A, rtol=1e-6)
    if wanted.routing is not None:
        assert found.routing is not None
        counts_LE = np.asarray(found.routing.counts_E).sum(axis=0)
        np.testing.assert_array_equal(counts_LE, wanted.routing.counts_E)
        balance_L = np.asarray(found.routing.balance_loss).mean(axis=0)
        np.testing.assert_allclose(balance_L, wanted.routing.balance_loss, rtol=1e-5)


@pytest.mark.parametrize(
    ("architecture", "mode", "data", "last"),
    [
        ("no-layers", "tp", 1, 8),
        pytest.param("llama", "cp", 2, 4, marks=pytest.mark.long),
    ],
)
def test_the_derivatives_that_gpus_have_are_those_of_one_device(
    architecture: str, mode: str, data: int, last: int
) -> None:
    """Norms and the cross-entropy have forms of their own there."""
    with trace_for(Target("gpu")):
        found = outcome(on_mesh.__wrapped__(architecture, mode, data, last), 1)
    wanted = expected(architecture, 1)
    assert_close(found.gradients, wanted.gradients, ROUNDING)
    np.testing.assert_allclose(found.losses_A, wanted.losses_A, rtol=1e-6)


ACCELERATORS = [
    # architecture, microbatches, keys of train.json
    ("no-layers", 1, ()),
    ("even-llama-low-rank", 1, (DOTS, TWICE)),
    ("experts", 1, (FULL,)),
    ("hybrid", 1, ()),
]


@pytest.mark.parametrize(
    ("architecture", "accumulation", "train"),
    [
        pytest.param(*case, id="{}-{}".format(*case), marks=pytest.mark.long if later else ())
        for later, case in enumerate(ACCELERATORS)
    ],
)
def test_on_accelerators_each_device_of_dp_gets_its_part_of_the_gradient_of_one_device(
    architecture: str, accumulation: int, train: Any
) -> None:
    data = 4 if architecture == "experts" else 8
    one = on_mesh.__wrapped__(architecture, "dp", data, 1, *train)
    with trace_for(Target("gpu")):
        gradient, aux, _ = one.gradients(*step_batch(accumulation))
    wanted = expected(architecture, accumulation)
    assert_close(arrays_of(gradient, one.shapes), wanted.gradients, ROUNDING)
    np.testing.assert_allclose(aux.loss, wanted.losses_A, rtol=1e-6)
    specs = dict(nnx.to_flat_state(one.layout._replace(mode="fsdp").specs(gradient)))
    flat = nnx.to_flat_state(gradient)
    assert any(specs[path] for path, _ in flat)
    for path, variable in flat:
        array = variable.get_value()
        assert shards_of(array) == shards_of(
            jax.device_put(array, NamedSharding(one.layout.mesh, specs[path]))
        )


def poisoned(one: OnMesh, token: int, value: float) -> OnMesh:
    """With another row of the token embedding for one token."""
    model = nnx.clone(one.model)
    table = model.token_embedding.embedding
    rows = np.array(table[...])
    rows[token] = value
    table.set_value(jax.device_put(rows, table[...].sharding))
    return one._replace(model=model)


def with_rare_token() -> tuple[np.ndarray, np.ndarray]:
    """Two microbatches, one sequence of the second with a token that is in no other."""
    inputs_ABS, targets_ABS = step_batch(2)
    inputs_ABS[1, 5, 3] = RARE
    return inputs_ABS, targets_ABS


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "mode", "data", "tensor", "train", "value", "named"),
    [
        ("gpt2", "fsdp", 8, 1, (THRICE,), np.nan, "the loss"),
        ("gpt2", "fsdp_tp", 4, 2, (), np.inf, "the loss"),
        # a row of zeros has a finite loss, and on the device that has it no gradient
        ("no-layers", "fsdp_tp", 4, 2, (), 0.0, EMBEDDING),
    ],
)
def test_a_nonfinite_value_on_one_device_drops_the_microbatch_on_all(
    architecture: str, mode: str, data: int, tensor: int, train: Any, value: float, named: str
) -> None:
    one = poisoned(on_mesh(architecture, mode, data, tensor, *train), RARE, value)
    gradient, aux, first_nonfinite_A = one.gradients(*with_rare_token())
    assert first_nonfinite_A[0] == ALL_FINITE
    assert checked_names(one.model, nnx.Param)[first_nonfinite_A[1]] == named
    for shard in first_nonfinite_A.addressable_shards:
        assert np.asarray(shard.data).tolist() == first_nonfinite_A.tolist()
    assert bool(np.isfinite(aux.loss[1])) == (value == 0.0)
    first = expected(architecture, 2, seen=SEQUENCES // 2)
    assert_close(arrays_of(gradient, one.shapes), first.gradients, ROUNDING)
    np.testing.assert_allclose(aux.loss[0], first.losses_A[0], rtol=1e-6)


@pytest.mark.long
def test_gradients_are_sharded_as_their_parameters() -> None:
    for mode, data, tensor, train in (("fsdp", 8, 1, (THRICE,)), ("fsdp_tp", 4, 2, ())):
        one = on_mesh("gpt2", mode, data, tensor, *train)
        gradient = one.gradients(*step_batch(2))[0]
        parameters = dict(nnx.to_flat_state(nnx.state(one.model)))
        for path, variable in nnx.to_flat_state(gradient):
            found, wanted = variable.get_value(), parameters[path].get_value()
            assert shards_of(found) == shards_of(wanted), path


def shards_of(array: jax.Array) -> dict[jax.Device, tuple[Any, ...]]:
    return {shard.device: (shard.index, shard.data.shape) for shard in array.addressable_shards}


def relative_errors(mode: str, mesh: tuple[int, int]) -> dict[str, float]:
    """Of each parameter's gradient with bfloat16 products, against one device in float32."""
    found = outcome(on_mesh("gpt2", mode, *mesh, ("compute_dtype", "bfloat16")), 1).gradients
    norms = {
        name: (np.linalg.norm(found[name] - wanted), np.linalg.norm(wanted))
        for name, wanted in expected("gpt2", 1).gradients.items()
    }
    least = max(norm for _, norm in norms.values()) / 100
    return {name: float(error / max(norm, least)) for name, (error, norm) in norms.items()}


@pytest.mark.long
def test_bfloat16_matmuls_lose_no_more_precision_on_a_mesh() -> None:
    """bfloat16 keeps 8 bits, one part in 256, and a gradient comes through some ten products."""
    alone = relative_errors("dp", (1, 1))
    shared = relative_errors("fsdp_tp", (4, 2))
    assert 1 / 1000 < max(alone.values()) < 1 / 20
    for name, error in shared.items():
        assert error < 1.5 * alone[name], name


def test_layers_and_head_are_gathered_in_bfloat16_and_gradients_scattered_in_float32() -> None:
    """Read before compilation, as XLA's CPU compiler makes all of it float32."""
    one = on_mesh("gpt2", "fsdp", 8, 1, ("compute_dtype", "bfloat16"))
    batch = place_batch(one.layout.mesh, *step_batch(1))
    text = jax.jit(one.compiled).lower(nnx.state(one.model), *batch, KEY).as_text()
    gathered = re.findall(r"stablehlo.all_gather.*-> tensor<(.*)>", text)
    scattered = re.findall(r"stablehlo.reduce_scatter(?:.*\n)*?.*-> tensor<(.*)>", text)
    kernels = {shape for shape in gathered if shape.endswith("bf16")}
    # queries and the like, output, up, down, head
    assert kernels == {"16x8x2xbf16", "8x2x16xbf16", "16x64xbf16", "64x16xbf16", "16x61xbf16"}
    assert not {shape.replace("bf16", "f32") for shape in kernels} & set(gathered)
    assert scattered
    assert all(shape.endswith("xf32") for shape in scattered)

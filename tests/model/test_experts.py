"""The mixture of experts: routing, gradients, the load-balancing loss."""

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pydantic import ValidationError

from rungs.config import run_config
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.model import feed_forward
from rungs.model.feed_forward import (
    ACTIVATIONS,
    FeedForward,
    MixtureOfExperts,
    Routing,
    activate,
    make_feed_forward,
)
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import target_losses
from rungs.objectives.table import make_train_step
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import place_batch
from rungs.run import metrics
from rungs.run.folder import StartOptions
from rungs.step.state import AbstractState, create_model_and_optimizer, named_arrays
from rungs.step.train_step import Step
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support import reference_gpt
from tests.support.configs import mesh_of, model_config, train_config
from tests.support.tiny_model import (
    bind_and_jit,
    random_model,
    random_tokens,
    with_random_parameters,
)
from tests.support.tiny_run import make_dataset, make_run

KINDS: dict[str, dict[str, Any]] = {
    "top-2-of-4": {},
    "top-1-of-3": {"n_experts": 3, "experts_per_token": 1, "feed_forward": "gelu"},
    "all-of-3": {"n_experts": 3, "experts_per_token": 3, "feed_forward": "geglu"},
    "without-biases": {"ffn_bias": False},
    "one": {"n_experts": 1, "experts_per_token": 1},
}


def expert_config(**changes: Any) -> ModelConfig:
    few = {"n_experts": 4, "experts_per_token": 2, "feed_forward": "swiglu", "ffn_dim": 10}
    return model_config(**few | changes)


@pytest.fixture(params=["of-all", "grouped"], autouse=True)
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test as on a device without a grouped matmul, and as on one that has it."""
    monkeypatch.setattr(feed_forward, "is_dense", lambda: request.param == "of-all")


def random_experts(architecture: ModelConfig) -> MixtureOfExperts:
    def make() -> MixtureOfExperts:
        made = make_feed_forward(architecture, jax.random.key(0))
        assert isinstance(made, MixtureOfExperts)
        return made

    return with_random_parameters(make)


def nonnegative_inputs() -> jax.Array:
    """Return x_BSD without negative elements."""
    return jnp.asarray(np.abs(np.random.default_rng(4).normal(size=(3, 7, 16))), jnp.float32)


def weights_of(module: nnx.Module) -> dict[str, np.ndarray]:
    arrays = named_arrays(module).items()
    return {f"blocks.feed_forward.{name}": np.asarray(a, np.float64) for name, a in arrays}


def router_probabilities(experts: MixtureOfExperts, x_BSD: jax.Array) -> np.ndarray:
    x_MD = np.asarray(x_BSD, np.float64).reshape(-1, x_BSD.shape[-1])
    kernel = np.asarray(experts.router.kernel[...], np.float64)
    return np.stack([reference_gpt.softmax(x_D @ kernel) for x_D in x_MD])


def apply_experts(experts: MixtureOfExperts, x_BSD: jax.Array) -> tuple[jax.Array, Routing]:
    y_BSD, routing = bind_and_jit(MixtureOfExperts.__call__, experts)(x_BSD)
    assert routing is not None
    return y_BSD, routing


def route_all_to(experts: MixtureOfExperts, *chosen: int) -> None:
    """Make the router prefer these experts, in this order, for inputs without negative elements.

    It prefers them only slightly: with a probability next to 1 the router's gradient would be a
    difference of nearly equal numbers, most of whose digits are rounding."""
    scores_E = np.full(experts.n_experts, -0.1)
    scores_E[list(chosen)] = np.linspace(0.2, 0.1, len(chosen))
    experts.router.kernel[...] = jnp.broadcast_to(scores_E, experts.router.kernel.shape)


@pytest.mark.parametrize("kind", KINDS)
def test_output_matches_the_float64_reference(kind: str) -> None:
    architecture, x_BSD = expert_config(**KINDS[kind]), nonnegative_inputs()
    experts = random_experts(architecture)
    y_BSD, routing = apply_experts(experts, x_BSD)
    per_token = architecture.experts_per_token
    best = np.argsort(-router_probabilities(experts, x_BSD))[:, :per_token]
    counted = np.bincount(best.ravel(), minlength=experts.n_experts)
    assert counted.sum() == 21 * (per_token or 0)
    np.testing.assert_array_equal(routing.counts_E, counted)
    weights = weights_of(experts)
    x = np.asarray(x_BSD, np.float64)
    expected = np.stack([reference_gpt.experts(architecture, weights, x_SD) for x_SD in x])
    np.testing.assert_allclose(y_BSD, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_no_token_is_dropped_when_all_go_to_one_expert() -> None:
    architecture, x_BSD = expert_config(experts_per_token=1), nonnegative_inputs()
    experts = random_experts(architecture)
    route_all_to(experts, 2)
    y_BSD, routing = apply_experts(experts, x_BSD)
    assert routing.counts_E.tolist() == [0, 0, 21, 0]
    alone = with_random_parameters(lambda: FeedForward(architecture, jax.random.key(0)))
    for name in ("gate", "up", "down"):
        for part in ("kernel", "bias"):
            getattr(getattr(alone, name), part)[...] = getattr(getattr(experts, name), part)[2]
    expected, _ = bind_and_jit(FeedForward.__call__, alone)(x_BSD)
    np.testing.assert_allclose(y_BSD, expected, rtol=1e-5, atol=1e-6)


def test_all_tokens_can_use_the_same_two_experts() -> None:
    experts = random_experts(expert_config())
    route_all_to(experts, 3, 0)
    _, routing = apply_experts(experts, nonnegative_inputs())
    assert routing.counts_E.tolist() == [21, 0, 0, 21]


def dense_mixture(experts: MixtureOfExperts, x_BSD: jax.Array) -> jax.Array:
    """Return the same output, computed as every token through every expert, most weighted by 0."""

    def linear(name: str, x: jax.Array, letters: str) -> jax.Array:
        part = getattr(experts, name)
        return jnp.einsum(letters, x, part.kernel[...]) + part.bias[...]

    probabilities_BSE = jax.nn.softmax(x_BSD @ experts.router.kernel[...])
    threshold = jnp.sort(probabilities_BSE)[..., -experts.experts_per_token, None]
    weights_BSE = jnp.where(probabilities_BSE >= threshold, probabilities_BSE, 0)
    gate_BSEF = ACTIVATIONS["swiglu"](linear("gate", x_BSD, "bsd,edf->bsef"))
    hidden_BSEF = gate_BSEF * linear("up", x_BSD, "bsd,edf->bsef")
    y_BSED = linear("down", hidden_BSEF, "bsef,efd->bsed")
    return jnp.einsum("bse,bsed->bsd", weights_BSE / weights_BSE.sum(-1, keepdims=True), y_BSED)


@pytest.mark.parametrize("balanced", [True, False], ids=["spread", "all-to-two"])
def test_gradients_match_a_dense_mixture(balanced: bool) -> None:
    experts, x_BSD = random_experts(expert_config()), nonnegative_inputs()
    if not balanced:
        route_all_to(experts, 3, 0)

    def loss(y_BSD: jax.Array) -> jax.Array:
        return jnp.sin(jnp.arange(y_BSD.size).reshape(y_BSD.shape) + y_BSD).sum()

    gradients = [
        bind_and_jit(nnx.grad(lambda m, x, f=f: loss(f(m, x)), argnums=(0, 1)), experts)(x_BSD)
        for f in (lambda experts, x_BSD: experts(x_BSD)[0], dense_mixture)
    ]
    found, expected = (jax.tree.leaves(gradient) for gradient in gradients)
    for one, other in zip(found, expected, strict=True):
        assert np.abs(other).max() > 0
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * np.abs(other).max())


def test_an_expert_that_overflows_does_not_disturb_tokens_of_others() -> None:
    """In float16 the values of expert 1 are infinite, but no token goes there."""
    experts, x_BSD = random_experts(expert_config()), nonnegative_inputs()
    route_all_to(experts, 3, 0)
    expected, _ = apply_experts(experts, x_BSD)
    for linear in (experts.gate, experts.up):
        assert linear is not None
        linear.kernel[...] = linear.kernel[...].at[1].set(6e4)

    def summed(experts: MixtureOfExperts, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        y_BSD, _ = experts(x_BSD.astype(jnp.float16))
        return y_BSD.astype(jnp.float32).sum(), y_BSD

    gradients_of = bind_and_jit(nnx.grad(summed, argnums=(0, 1), has_aux=True), experts)
    gradients, y_BSD = gradients_of(x_BSD)
    np.testing.assert_allclose(y_BSD, expected, rtol=1e-2, atol=1e-2 * np.abs(expected).max())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))


def test_gate_and_other_projection_are_clamped() -> None:
    gate, up = (np.array(x, np.float32) for x in ([-20, 3, 9, 50, 1], [-9, 0.5, 8, -2, 70]))
    small, near = np.minimum(gate.astype(float), 7), np.clip(up.astype(float), -7, 7)
    expected = small / (1 + np.exp(-1.702 * small)) * (near + 1)
    found = activate(ACTIVATIONS["swiglu_clamped"], jnp.asarray(up), jnp.asarray(gate))
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_balance_loss_matches_its_formula() -> None:
    experts, x_BSD = random_experts(expert_config()), nonnegative_inputs()
    _, routing = apply_experts(experts, x_BSD)
    probabilities = router_probabilities(experts, x_BSD)
    shares_E = np.bincount(np.argsort(-probabilities)[:, :2].ravel(), minlength=4) / 42
    expected = 4 * (shares_E * probabilities.mean(axis=0)).sum()
    assert abs(expected - 1) > 0.01
    assert float(routing.balance_loss) == pytest.approx(expected, rel=1e-5)


def test_balance_loss_is_1_if_even_and_n_experts_if_one_expert_gets_all() -> None:
    experts = random_experts(expert_config(experts_per_token=1))
    experts.router.kernel[...] = jnp.zeros((16, 4))
    assert float(apply_experts(experts, nonnegative_inputs())[1].balance_loss) == pytest.approx(1)
    route_all_to(experts, 1)
    experts.router.kernel[...] *= 100
    assert float(apply_experts(experts, nonnegative_inputs())[1].balance_loss) == pytest.approx(4)


def test_balance_loss_gradient_reaches_only_the_router() -> None:
    experts, x_BSD = random_experts(expert_config()), nonnegative_inputs()
    gradient = bind_and_jit(nnx.grad(lambda m, x_BSD: m(x_BSD)[1].balance_loss), experts)(x_BSD)
    for path, leaf in nnx.to_flat_state(gradient):
        assert bool((leaf.get_value() != 0).any()) == (path[0] == "router"), path
    # by finite differences in float64, with the shares of tokens held constant
    shares_E = np.asarray(apply_experts(experts, x_BSD)[1].counts_E) / 42
    kernel_DE = np.asarray(experts.router.kernel[...], np.float64)
    x_MD = np.asarray(x_BSD, np.float64).reshape(-1, 16)

    def balance(d: int, e: int, by: float) -> float:
        moved_DE = kernel_DE.copy()
        moved_DE[d, e] += by
        probabilities = np.stack([reference_gpt.softmax(x_D @ moved_DE) for x_D in x_MD])
        return float(4 * (shares_E * probabilities.mean(axis=0)).sum())

    expected_DE = np.zeros((16, 4))
    for d, e in np.ndindex(16, 4):
        expected_DE[d, e] = (balance(d, e, 1e-4) - balance(d, e, -1e-4)) / 2e-4
    np.testing.assert_allclose(gradient["router"]["kernel"][...], expected_DE, atol=1e-6)


def test_routing_of_every_layer_is_returned_in_order() -> None:
    architecture = {"n_layers": 3, "layer_pattern": ["sliding", "global"], "sliding_window": 3}
    model = random_model(n_experts=4, experts_per_token=2, ffn_dim=10, **architecture)
    blocks: Any = model.blocks
    blocks.feed_forward_norm.scale[...] = jnp.zeros((3, 16))
    blocks.feed_forward_norm.bias[...] = jnp.ones((3, 16))
    for layer in range(3):
        blocks.feed_forward.router.kernel[layer] = jnp.zeros((16, 4)).at[:, layer].set(1)
    result = bind_and_jit(lambda model, tokens: model.forward(tokens), model)(random_tokens(2, 8))
    assert result.routing is not None
    assert result.routing.balance_loss.shape == (3,)
    # the first choice is the layer's own, the second the first of three equals
    assert result.routing.counts_E.tolist() == [[16, 16, 0, 0], [16, 16, 0, 0], [16, 0, 16, 0]]


MIXTURE = RunConfig(expert_config(n_layers=3), train_config())


def fresh(devices: int = 1) -> tuple[GPT, SkippingOptimizer]:
    """Return a model with random weights and its optimizer, without compiling their
    initialization."""
    state, rng = AbstractState(MIXTURE, 60, mesh_of(devices)), np.random.default_rng(5)
    weights = {
        name: jax.device_put(
            np.float32(0.2 * rng.normal(size=like.shape) + name.endswith("scale")), like.sharding
        )
        for name, like in state.weights.items()
    }
    zeros = {
        name: jax.device_put(np.zeros(like.shape, like.dtype), like.sharding)
        for name, like in state.optimizer.items()
    }
    return state.fill(weights, zeros)


def batch(step: int = 0, devices: int = 1) -> tuple[jax.Array, ...]:
    tokens = np.random.default_rng(step).integers(32, size=(2, 4, 9), dtype=np.int32)
    inputs_ABS, targets_ABS = tokens[..., :-1], tokens[..., 1:].copy()
    targets_ABS[1, :, :6] = -1
    return place_batch(mesh_of(devices), inputs_ABS, targets_ABS)


@functools.cache
def train_step(balancing: float, devices: int = 1) -> Step:
    return make_train_step(train_config(load_balancing_weight=balancing), mesh_of(devices))


def test_train_step_returns_routing_and_trains_on_both_losses() -> None:
    balancing = 1.0
    model, optimizer = fresh()
    inputs_ABS, targets_ABS = batch()

    def objective(model: GPT, inputs_BS: jax.Array, targets_BS: jax.Array) -> Any:
        forward = model.forward(inputs_BS)
        assert forward.routing is not None
        loss = target_losses(forward.logits_BSV, targets_BS).sum() / (targets_BS >= 0).sum()
        return loss + balancing * forward.routing.balance_loss.mean(), (loss, forward.routing)

    value_and_grad = bind_and_jit(nnx.value_and_grad(objective, has_aux=True), model)
    pairs = zip(inputs_ABS, targets_ABS, strict=True)
    values, gradients = zip(*(value_and_grad(*pair) for pair in pairs), strict=True)
    # only a quarter of the second microbatch's targets count
    mean = jax.tree.map(lambda one, other: (one + other / 4) / (1 + 1 / 4), *gradients)
    norm = math.sqrt(sum(float((leaf**2).sum()) for leaf in jax.tree.leaves(mean)))
    result = train_step(balancing)(model, optimizer, inputs_ABS, targets_ABS)
    assert float(result.gradient_norm) == pytest.approx(norm, rel=1e-4)
    losses, routings = zip(*(aux for _, aux in values), strict=True)
    # the recorded loss is the cross-entropy alone
    np.testing.assert_allclose(result.losses_A, losses, rtol=1e-5)
    assert result.routing is not None
    counts_LE = np.asarray(result.routing.counts_E)
    assert counts_LE.sum(axis=-1).tolist() == [2 * inputs_ABS.size] * 3
    np.testing.assert_array_equal(counts_LE, sum(routing.counts_E for routing in routings))
    balance = np.mean([routing.balance_loss for routing in routings])
    assert float(result.routing.balance_loss) == pytest.approx(balance, rel=1e-5)


@pytest.mark.long
def test_training_on_the_balance_loss_evens_out_expert_use() -> None:
    unevenness = {}
    for balancing in (0.0, 1.0):
        model, optimizer = fresh()
        counts_LE = np.zeros((3, 4))
        for step in range(60):
            result = train_step(balancing)(model, optimizer, *batch(step))
            assert result.routing is not None
            counts_LE += np.asarray(result.routing.counts_E) if step >= 50 else 0
        shares_LE = counts_LE / counts_LE.sum(axis=-1, keepdims=True)
        unevenness[balancing] = (4 * shares_LE**2).sum(axis=-1).mean() - 1
    assert unevenness[1.0] < 0.2 * unevenness[0.0]


BIASED = {"expert_routing": {"balance_bias": True, "scores": "sigmoid"}}


def biases_of(model: GPT) -> np.ndarray:
    blocks: Any = model.blocks
    return np.asarray(blocks.feed_forward.router.balance_bias[...])


@pytest.fixture
def biased() -> tuple[GPT, SkippingOptimizer, Step]:
    config = RunConfig(expert_config(**BIASED), train_config(balance_bias_rate=0.03))
    model, optimizer = create_model_and_optimizer(config, 60)
    return model, optimizer, make_train_step(config.train)


def test_biases_rise_for_experts_with_too_few_tokens(
    biased: tuple[GPT, SkippingOptimizer, Step],
) -> None:
    """Algorithm 1 of arXiv 2408.15664; a step that is skipped changes nothing."""
    model, optimizer, step = biased
    expected_LE = np.zeros((2, 4))
    for number in range(3):
        result = step(model, optimizer, *batch(number))
        assert result.routing is not None
        counts_LE = np.asarray(result.routing.counts_E)
        expected_LE += 0.03 * np.sign(counts_LE.mean(axis=1, keepdims=True) - counts_LE)
        np.testing.assert_allclose(biases_of(model), expected_LE, atol=1e-6)
    assert len(np.unique(expected_LE)) > 2
    assert step(model, optimizer, *batch(), loss_limit=0.0).skipped
    np.testing.assert_allclose(biases_of(model), expected_LE, atol=1e-6)


def test_biases_are_no_parameters_and_there_is_no_loss_for_balance(
    biased: tuple[GPT, SkippingOptimizer, Step],
) -> None:
    model, optimizer, _ = biased
    assert "blocks.feed_forward.router.balance_bias" in named_arrays(model)
    assert not any("balance_bias" in name for name in named_arrays(model, only=optimizer.wrt))
    assert not any("balance_bias" in name for name in named_arrays(optimizer))

    def balance(model: GPT, tokens_BS: jax.Array) -> jax.Array:
        routing = model.forward(tokens_BS).routing
        assert routing is not None
        return routing.balance_loss.sum()

    gradient = bind_and_jit(nnx.grad(balance), model)(random_tokens(2, 8))
    assert not any(leaf.any() for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"n_experts": None, "experts_per_token": None}, "expert_routing: needs n_experts"),
        ({"expert_routing": {"groups": 2}}, "groups and groups_per_token: give both or neither"),
        ({"expert_routing": {"groups": 2, "groups_per_token": 3}}, "groups_per_token: 3 is above"),
        ({"expert_routing": {"groups": 3, "groups_per_token": 1}}, "groups: 3 does not divide"),
        ({"expert_routing": {"groups": 4, "groups_per_token": 1}}, "experts_per_token: 2 is more"),
        ({"n_dense_layers": 1}, "dense_ffn_dim: missing; required with n_dense_layers"),
        ({"n_dense_layers": 2, "dense_ffn_dim": 8}, "n_dense_layers: 2 is not below n_layers 2"),
    ],
)
def test_routing_that_does_not_fit_is_refused(keys: dict[str, Any], error: str) -> None:
    with pytest.raises(ValidationError, match=error):
        expert_config(**BIASED | keys)


@pytest.mark.long
def test_metrics_lines_contain_the_routing(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    run = make_run(tmp_path / "run", min_train_tokens=256)
    model = json.loads((run.path / "model.json").read_text())
    experts = {"n_experts": 4, "experts_per_token": 2}
    (run.path / "model.json").write_text(json.dumps(model | experts))
    assert (
        launch(
            run, run_config.load_run(run.path), StartOptions(), on_datasets(tmp_path / "datasets")
        )
        == 0
    )
    steps = metrics.read(run.metrics)
    assert len(steps) == 2
    for step in steps:
        assert np.sum(step.expert_tokens or [], axis=1).tolist() == [128 * 2] * 2
        # a router that starts near zero gives all experts about the same probability
        assert step.load_balancing_loss == pytest.approx(1, abs=0.05)
        dense = dataclasses.replace(step, expert_tokens=None, load_balancing_loss=None)
        added = json.loads(step.as_line()).keys() - json.loads(dense.as_line()).keys()
        assert added == {"expert_tokens", "load_balancing_loss"}

"""The compiled update of reinforcement learning against its definition, on one device and several.

The definition is `jax.grad` of a weighted sum of `log_softmax`, of all sequences at once, and
optax's AdamW. Axes as in `rungs/step/train_step.py`; N for all sequences.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import ReinforceRunConfig, RunConfig
from rungs.model.gpt import GPT
from rungs.objectives.policy import PolicyObjective, PolicyTokens, has_weight
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import place_batch
from rungs.parallel.target_device import Target, trace_for
from rungs.step.shortcuts import Shortcuts
from rungs.step.state import AbstractState, create_model_and_optimizer
from rungs.step.train_step import StepResult, make_step
from tests.support.configs import mesh_of, model_config
from tests.support.sharded_models import (
    ARCHITECTURES,
    LENGTH,
    SEQUENCES,
    SMALL,
    TOKENS,
    arrays_of,
    assert_close,
    random_weights,
    step_batch,
)

TEMPERATURE, KL, SAMPLER_LIMIT, LIMIT, RATE = 0.7, 0.2, 1.1, 0.3, 0.02
SHORT = 3
"""A length that microbatches may be cut to."""
ROUNDING = 1e-4
"""Share of an array's largest element, as in `tests/parallel/test_gradients.py`."""
SETTINGS: dict[str, Any] = {
    "start_from": "imported",
    "tasks": [{"source": "parity"}],
    "steps": 10,
    "updates_per_rollout": 2,
    "prompts_per_step": 4,
    "samples_per_prompt": SEQUENCES // 4,
    "max_new_tokens": LENGTH - 1,
    "temperature": TEMPERATURE,
    "loss": "dapo",
    "max_sampler_ratio": SAMPLER_LIMIT,
    "kl_coefficient": KL,
    "clipping_max_norm": LIMIT,
    "learning_rate": RATE,
    "warmup_period_percent": 0,
    "weight_decay": 0.5,
    "decayed_parameters": "all",
    "epsilon": 1e-3,  # else Adam divides by gradients that are next to nothing but rounding
    "checkpoint_interval": 1,
    "compute_dtype": "float32",
}


def make_run(
    sizes: dict[str, Any], microbatches: int, architecture: str = "gpt2", **keys: Any
) -> ReinforceRunConfig:
    size = {"microbatch_size": SEQUENCES // microbatches}
    train = ReinforceConfig.model_validate({**SETTINGS, "sharding": sizes, **size, **keys})
    return RunConfig(model_config(**{**SMALL, **ARCHITECTURES[architecture]}), train)


class Batch(NamedTuple):
    inputs_NS: np.ndarray
    targets_NS: np.ndarray
    tokens: PolicyTokens

    def placed(self, mesh: Mesh, microbatches: int) -> tuple[Array, ...]:
        shape = (microbatches, -1, LENGTH)
        arrays = (self.inputs_NS, self.targets_NS, *self.tokens)
        return place_batch(mesh, *(array.reshape(shape) for array in arrays))


@functools.cache
def make_batch() -> Batch:
    """Return texts of which the first quarter is short, and the last has no advantages."""
    inputs_NS, targets_NS = (array.reshape(-1, LENGTH) for array in step_batch(1))
    rng = np.random.default_rng(4)
    near = -np.log(TOKENS) + 0.5 * rng.normal(size=(3, *targets_NS.shape))
    shares, advantages = rng.uniform(0.5, 1.5, targets_NS.shape), rng.normal(size=targets_NS.shape)
    targets_NS[: SEQUENCES // 4, SHORT:] = -1
    advantages[-SEQUENCES // 4 :] = 0
    arrays = (shares / targets_NS.size, advantages, *near)
    return Batch(inputs_NS, targets_NS, PolicyTokens(*(a.astype(np.float32) for a in arrays)))


def plain_weights(log_probs: Array, is_first: bool, tokens: PolicyTokens, kl: float) -> Array:
    """Return the weights of DAPO with a truncated sampler ratio and a KL term."""
    old = log_probs if is_first else tokens.old_log_probs
    ratio = jnp.exp(log_probs - old)
    is_kept = jnp.where(tokens.advantages > 0, ratio <= 1.28, ratio >= 0.8)
    sampler = jnp.minimum(jnp.exp(old - tokens.sampler_log_probs), SAMPLER_LIMIT)
    pull = kl * (log_probs - tokens.reference_log_probs)
    return tokens.shares * (tokens.advantages * ratio * is_kept * sampler - pull)


class Expected(NamedTuple):
    """Of an update."""

    loss: float
    log_probs_NS: np.ndarray
    entropies_NS: np.ndarray
    gradient_norm: float
    weights: dict[str, np.ndarray]
    """Afterwards."""


def plain_loss(model: GPT, batch: Batch, is_first: bool, kl: float) -> tuple[Array, Any]:
    log_p = jax.nn.log_softmax(model(jnp.asarray(batch.inputs_NS)) / TEMPERATURE)
    own = jnp.take_along_axis(log_p, jnp.maximum(batch.targets_NS, 0)[..., None], -1)[..., 0]
    weights = plain_weights(jax.lax.stop_gradient(own), is_first, batch.tokens, kl)
    is_sampled, entropies = batch.targets_NS >= 0, -(jnp.exp(log_p) * log_p).sum(-1)
    statistics = tuple(jnp.where(is_sampled, a, 0) for a in (own, entropies))
    return -jnp.where(is_sampled, weights * own, 0).sum(), statistics


def plain_updates(run: ReinforceRunConfig, batch: Batch) -> list[Expected]:
    """Return what a first and a later update of the same texts do."""
    mesh = mesh_of(1)
    model, _ = AbstractState(run, 1, mesh).fill(random_weights(run, mesh), {})
    graph, weights = nnx.split(model)
    rule = optax.chain(
        optax.clip_by_global_norm(LIMIT), optax.adamw(RATE, eps=1e-3, weight_decay=0.5)
    )
    state, shapes, updates = rule.init(weights), AbstractState(run, 1, mesh).shapes, []

    @functools.partial(jax.jit, static_argnums=1)
    def gradient_of(weights: nnx.State, is_first: bool) -> Any:
        def loss(weights: nnx.State) -> tuple[Array, Any]:
            return plain_loss(nnx.merge(graph, weights), batch, is_first, run.train.kl_coefficient)

        return jax.value_and_grad(loss, has_aux=True)(weights)

    @jax.jit
    def updated(weights: nnx.State, state: Any, gradient: nnx.State) -> Any:
        change, state = rule.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state, optax.tree_utils.tree_norm(gradient)

    for is_first in (True, False):
        (loss, statistics), gradient = gradient_of(weights, is_first)
        weights, state, norm = updated(weights, state, gradient)
        arrays = arrays_of(weights, shapes)
        log_probs, entropies = map(np.asarray, statistics)
        updates.append(Expected(float(loss), log_probs, entropies, float(norm), arrays))
    return updates


@functools.cache
def expected(kl: float) -> list[Expected]:
    return plain_updates(make_run({"data": 1}, 1, kl_coefficient=kl), make_batch())


class Taken(NamedTuple):
    run: ReinforceRunConfig
    mesh: Mesh
    model: GPT
    optimizer: SkippingOptimizer

    @classmethod
    def start(cls, mode: str, devices: int, microbatches: int, **keys: Any) -> "Taken":
        mesh, sharding = mesh_of(devices), {"mode": mode, "data": devices}
        run = make_run(sharding, microbatches, **keys)
        return cls(run, mesh, *create_model_and_optimizer(run, 20, mesh, random_weights(run, mesh)))

    def update(self, batch: Batch, *, is_first: bool = True) -> StepResult:
        train = self.run.train
        shortcuts = Shortcuts(
            [SHORT, LENGTH],
            lambda _inputs, _targets, *tokens: has_weight(self.run, PolicyTokens(*tokens)),
        )
        objective = PolicyObjective(train, is_first, LENGTH)
        step = make_step(objective, train, self.mesh, shortcuts)
        placed = batch.placed(self.mesh, self.run.train.microbatches_per_step)
        return jax.device_get(step(self.model, self.optimizer, *placed))

    @property
    def weights(self) -> dict[str, np.ndarray]:
        shapes = AbstractState(self.run, 1, self.mesh).shapes
        return arrays_of(nnx.state(self.model), shapes)


def assert_as_expected(found: StepResult, taken: Taken, wanted: Expected) -> None:
    assert found.finite_A.all()
    assert found.loss == pytest.approx(wanted.loss, rel=1e-4)
    assert found.gradient_norm == pytest.approx(wanted.gradient_norm, rel=1e-4)
    assert found.clipped == (wanted.gradient_norm > LIMIT)
    for array, other in zip(
        found.outputs_ABS, (wanted.log_probs_NS, wanted.entropies_NS), strict=True
    ):
        np.testing.assert_allclose(array.reshape(-1, LENGTH), other, rtol=1e-4, atol=1e-5)
    assert_close(taken.weights, wanted.weights, within=ROUNDING)


@pytest.mark.parametrize(
    ("mode", "devices", "microbatches", "kl"),
    [
        ("dp", 1, 4, 0.0),
        pytest.param("zero", 4, 1, KL, marks=pytest.mark.long),
    ],
)
def test_two_updates_are_those_of_the_definition(
    mode: str, devices: int, microbatches: int, kl: float
) -> None:
    """`zero` is dp as on accelerators."""
    with trace_for(Target("gpu") if mode == "zero" else None):
        taken = Taken.start(mode.replace("zero", "dp"), devices, microbatches, kl_coefficient=kl)
        for is_first, wanted in zip((True, False), expected(kl), strict=True):
            found = taken.update(make_batch(), is_first=is_first)
            assert_as_expected(found, taken, wanted)

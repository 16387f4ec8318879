"""`skipping_optimizer.py` and `train_step.py` against optax's MultiSteps and larger batches."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.model.gpt import GPT
from rungs.objectives.table import make_train_step
from rungs.optim.schedule import learning_rate_schedule
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel.sharding import one_device, place_batch
from rungs.step.state import create_model_and_optimizer, named_arrays
from tests.support.configs import model_config, train_config
from tests.support.sharded_models import RECIPE

TOTAL_STEPS = 20


def fresh(**changes: Any) -> tuple[TrainConfig, GPT, SkippingOptimizer]:
    train = train_config(**changes)
    run = RunConfig(model_config(n_layers=1), train)
    return train, *create_model_and_optimizer(run, TOTAL_STEPS, one_device())


def batch(accumulation: int, size: int = 4, seed: int = 1) -> tuple[jax.Array, ...]:
    tokens = jax.random.randint(jax.random.key(seed), (accumulation, size, 9), 0, 32)
    return place_batch(one_device(), *(np.asarray(t) for t in (tokens[..., :-1], tokens[..., 1:])))


@nnx.jit
def update(model: GPT, optimizer: SkippingOptimizer, gradient: nnx.State) -> None:
    optimizer.update(model, gradient, jnp.asarray(1.0))


def arrays(module: Any) -> dict[str, np.ndarray]:
    return {name: np.array(array) for name, array in named_arrays(module).items()}


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        # Adam divides by the gradient's size, so rounding shows relative to the step of 0.01
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=2e-6, err_msg=name)


def gradients_of(model: GPT, inputs_ABS: jax.Array, targets_ABS: jax.Array) -> list[nnx.State]:
    def loss(model: GPT, inputs_BS: jax.Array, targets_BS: jax.Array) -> jax.Array:
        chances_BSV = jax.nn.log_softmax(model(inputs_BS))
        return -jnp.take_along_axis(chances_BSV, targets_BS[..., None], axis=-1).mean()

    return [nnx.grad(loss)(model, i, t) for i, t in zip(inputs_ABS, targets_ABS, strict=True)]


@pytest.mark.long
def test_several_steps_equal_those_of_optax_multi_steps() -> None:
    train, model, optimizer = fresh(clipping_max_norm=0.05, gradient_accumulation_steps=3)
    oracle_model = nnx.clone(model)
    decayed = jax.tree.map(
        lambda param: "bias" not in str(param.axes) and param.inputs > 0,
        nnx.state(model),
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )
    schedule = learning_rate_schedule(train, TOTAL_STEPS)
    adamw = optax.adamw(schedule, 0.9, 0.999, 1e-8, weight_decay=0.01, mask=decayed)
    clipped = optax.chain(optax.clip_by_global_norm(0.05), adamw)
    oracle = nnx.Optimizer(oracle_model, optax.MultiSteps(clipped, 3), wrt=nnx.Param)
    train_step = make_train_step(train)
    for step in range(4):
        inputs_ABS, targets_ABS = batch(3, seed=step)
        for gradient in gradients_of(oracle_model, inputs_ABS, targets_ABS):
            oracle.update(oracle_model, gradient)
        result = train_step(model, optimizer, inputs_ABS, targets_ABS)
        assert result.clipped
        assert_close(arrays(model), arrays(oracle_model))


@pytest.mark.long
def test_gradient_accumulation_equals_one_larger_batch() -> None:
    inputs_ABS, targets_ABS = batch(4)
    results = []
    for shape in ((4, 4, 8), (1, 16, 8)):
        train, model, optimizer = fresh(clipping_max_norm=0.5)
        make_train_step(train)(
            model, optimizer, inputs_ABS.reshape(shape), targets_ABS.reshape(shape)
        )
        results.append(arrays(model))
    assert_close(*results)


def poison_row(module: Any, value: float) -> None:
    """One row of the token embedding replaced: only microbatches with token 7 meet it."""
    table = module.token_embedding.embedding
    table[...] = table[...].at[7].set(value)


@pytest.mark.parametrize("value", [math.inf, 1e38])
def test_a_nonfinite_microbatch_drops_only_itself(value: float) -> None:
    inputs_ABS, targets_ABS = (jnp.where(part == 7, 8, part) for part in batch(4))
    with_bad = inputs_ABS.at[2, 1, 3].set(7)
    others = jnp.array([0, 1, 3])
    train, model, optimizer = fresh(clipping_max_norm=0.5)
    poison_row(model, value)
    graph, state = nnx.split((model, optimizer))
    other_model, other_optimizer = nnx.merge(graph, jax.tree.map(jnp.copy, state))
    train_step = make_train_step(train)
    result = train_step(model, optimizer, with_bad, targets_ABS)
    train_step(other_model, other_optimizer, inputs_ABS[others], targets_ABS[others])
    assert result.finite_A.tolist() == [True, True, False, True]
    assert_close(arrays(model), arrays(other_model))
    assert_close(arrays(optimizer), arrays(other_optimizer))


@pytest.mark.long
def test_if_only_the_norm_overflows_only_the_schedule_moves() -> None:
    _, model, optimizer = fresh(clipping_max_norm=0.5)
    weights, state = arrays(model), arrays(optimizer)
    large = jax.tree.map(lambda w: jnp.full_like(w, 1e30), nnx.state(model, nnx.Param))
    update = optimizer.update(model, large, jnp.asarray(1.0))
    assert (bool(update.applied), bool(update.clipped)) == (False, False)
    after = arrays(optimizer)
    assert int(after.pop("step")) == int(state.pop("step")) + 1
    for found, expected in ((arrays(model), weights), (after, state)):
        assert all((found[name] == array).all() for name, array in expected.items())


def test_without_a_finite_microbatch_only_the_schedule_moves() -> None:
    train, model, optimizer = fresh()
    train_step = make_train_step(train)
    train_step(model, optimizer, *batch(1, seed=3))
    poison_row(model, math.nan)
    weights, state = arrays(model), arrays(optimizer)
    all_bad = tuple(part.at[:, :, 0].set(7) for part in batch(1))
    result = train_step(model, optimizer, *all_bad)
    assert not result.finite_A.any()
    assert float(result.gradient_norm) == 0
    schedule = learning_rate_schedule(train, TOTAL_STEPS)
    assert float(result.learning_rate) == pytest.approx(float(schedule(1)))
    assert int(state.pop("step")) == 1
    after = arrays(optimizer)
    assert int(after.pop("step")) == 2
    for before, now in ((weights, arrays(model)), (state, after)):
        for name in before:
            assert np.array_equal(before[name], now[name], equal_nan=True), name


@pytest.mark.long
def test_decay_acts_on_matrices_not_on_stacked_biases() -> None:
    _, model, optimizer = fresh(weight_decay=0.5, warmup_period_percent=0)
    ones = jax.tree.map(jnp.ones_like, nnx.state(model))
    nnx.update(model, ones)
    optimizer.update(model, jax.tree.map(jnp.zeros_like, ones), jnp.asarray(1))
    for name, array in arrays(model).items():
        matrix = name.endswith(("kernel", "embedding"))
        expected = 1 - 0.01 * 0.5 if matrix else 1.0
        np.testing.assert_allclose(array, expected, rtol=1e-6, err_msg=name)


def test_cautious_decay_acts_where_the_update_moves_a_weight_towards_zero() -> None:
    def moved(**keys: Any) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        _, model, wrapped = fresh(optimizer="muon", warmup_period_percent=0, **keys)
        before = arrays(model)
        gradient = jax.tree.map(
            lambda w: jnp.asarray(np.random.default_rng(w.size).normal(size=w.shape), w.dtype),
            nnx.state(model),
        )
        update(model, wrapped, gradient)
        return before, {name: after - before[name] for name, after in arrays(model).items()}

    before, plain = moved(weight_decay=0)
    _, decayed = moved(weight_decay=50.0, cautious_weight_decay=True)
    for name, weight in before.items():
        is_matrix = name.endswith(("kernel", "embedding"))
        expected = np.where(is_matrix & (plain[name] * weight < 0), -0.01 * 50.0 * weight, 0)
        np.testing.assert_allclose(decayed[name] - plain[name], expected, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("cautious", [False, True])
def test_weights_decay_by_the_schedules_of_their_groups(cautious: bool) -> None:
    """Without a gradient a weight is multiplied by 1 − rate × weight decay in each step."""
    _, model, wrapped = fresh(
        weight_decay=2.0,
        weight_decay_schedule="linear",
        cautious_weight_decay=cautious,
        schedule="constant",
        group_schedules={"embedding": "linear"},
        warmup_period_percent=0,
        min_learning_rate_percent=0,
    )
    before = arrays(model)
    zeros = jax.tree.map(jnp.zeros_like, nnx.state(model))
    rates = {"constant": [0.01] * 3, "linear": [0.01 * (1 - step / 20) for step in range(3)]}
    for _ in range(3):
        update(model, wrapped, zeros)
    for name, array in arrays(model).items():
        schedule = "linear" if name.endswith("embedding") else "constant"
        decays = [1 - rate * (2 - step / 10) for step, rate in enumerate(rates[schedule])]
        factor = math.prod(decays) if name.endswith(("kernel", "embedding")) else 1
        np.testing.assert_allclose(array, factor * before[name], rtol=1e-6, err_msg=name)


MULTIPLIERS = {
    "embedding": 2.0,
    "head": 3.0,
    "matrices": 5.0,
    "vectors": 7.0,
    "residual_scale": 11.0,
    "embedding_skip": 13.0,
}


def test_each_group_of_parameters_has_its_own_multiple_of_the_learning_rate() -> None:
    """Also with muP and weight decay, of which it is a multiple as well."""
    one_layer = {"n_layers": 1, "value_embedding_every": 1}
    model_keys = RECIPE | one_layer | {"norm_parameters": True, "mup": {"base_emb_dim": 8}}

    def moved(**keys: Any) -> dict[str, np.ndarray]:
        train = train_config(optimizer="muon", weight_decay=3.0, clipping_max_norm=None, **keys)
        run = RunConfig(model_config(**model_keys), train)
        model, wrapped = create_model_and_optimizer(run, TOTAL_STEPS, one_device())
        before = arrays(model)
        gradient = jax.tree.map(
            lambda w: np.cos(np.arange(w.size, dtype=np.float32) + 1).reshape(w.shape),
            nnx.state(model),
        )
        update(model, wrapped, gradient)
        return {name: after - before[name] for name, after in arrays(model).items()}

    plain = moved(learning_rate=1e-3, warmup_period_percent=0)
    found = moved(
        learning_rate=1e-3, warmup_period_percent=0, learning_rate_multipliers=MULTIPLIERS
    )
    factors = {
        "token_embedding.embedding": 2.0,
        "value_embedding.embedding": 2.0,
        "head.kernel": 3.0,
        "value_gates": 7.0,
        "final_norm.scale": 7.0,
        "embedding_norm.scale": 7.0,
        "blocks.residual_scale": 11.0,
        "blocks.embedding_skip": 13.0,
    }
    for name, change in plain.items():
        in_blocks = 5.0 if name.endswith("kernel") else 7.0
        factor = factors.get(name, in_blocks)
        np.testing.assert_allclose(found[name], factor * change, rtol=1e-3, atol=1e-6, err_msg=name)
    assert factors.keys() <= plain.keys()


@pytest.mark.long
def test_one_compilation_serves_all_steps() -> None:
    train, model, optimizer = fresh()
    train_step = make_train_step(train)
    for step in range(3):
        train_step(model, optimizer, *batch(2, seed=step))
    assert train_step.jitted_fn._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.long
def test_dropout_differs_between_microbatches_and_steps_and_repeats_with_the_seed() -> None:
    train, model, optimizer = fresh(drop_rate=0.5, learning_rate=1e-12)
    same = tuple(jnp.broadcast_to(part, (2, *part.shape[1:])) for part in batch(1))
    train_step = make_train_step(train)
    losses = [train_step(model, optimizer, *same).losses_A.tolist() for _ in range(2)]
    assert len({loss for step in losses for loss in step}) == 4
    train, model, optimizer = fresh(drop_rate=0.5, learning_rate=1e-12)
    assert make_train_step(train)(model, optimizer, *same).losses_A.tolist() == losses[0]

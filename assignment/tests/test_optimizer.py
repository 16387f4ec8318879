"""gradient_clipping, get_lr_cosine_schedule and build_optimizer_transform."""

import math
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from assignment.tests.mistakes import check, explained

CONFIG: dict[str, Any] = {
    "type": "adamw",
    "lr": 0.1,
    "betas": [0.9, 0.95],
    "eps": 1e-6,
    "weight_decay": 0.2,
}


def norm(tree: Any) -> float:
    return math.sqrt(sum(float(np.square(leaf).sum()) for leaf in jax.tree.leaves(tree)))


def two(first: float, second: float) -> Any:
    return {"a": np.array([first, 0]), "b": {"c": np.array([[second]])}}


def test_gradient_clipping_shortens_all_gradients_together(code: ModuleType) -> None:
    gradients = {"a": jnp.array([3.0, 0.0]), "b": {"c": jnp.array([[4.0]])}}
    clipped = code.gradient_clipping(gradients, 0.5)
    mistakes = {
        "each gradient is clipped by its own norm; the norm is that of all together": two(0.5, 0.5),
        "these are divided by the squared norm: its root is missing": two(0.06, 0.08),
        "these have the norm 1: multiply by max_l2_norm / norm": two(0.6, 0.8),
        "nothing is clipped": gradients,
        "the norm is the sum of absolute values, or of the arrays' norms; L2 is the root of the sum"
        " of all squares": two(1.5 / 7, 2 / 7),
    }
    check(clipped, two(0.3, 0.4), mistakes)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_gradient_clipping_leaves_short_gradients(code: ModuleType, scale: float) -> None:
    gradients = [jnp.array([0.6, 0.8]) * scale]
    [clipped] = code.gradient_clipping(gradients, 1.5)
    assert not np.isnan(clipped).any(), (
        "gradients of 0 become NaN, 0 / 0, and NaN times 0 is still NaN: choose the scale with"
        " jnp.where, or divide by max(norm, max_l2_norm)"
    )
    assert scale == 0 or norm([clipped]) < 1.4, (
        "a short gradient is made as long as max_l2_norm; it stays as it is"
    )
    np.testing.assert_allclose(clipped, gradients[0], rtol=1e-6)


def test_gradient_clipping_takes_the_gradients_of_a_module(code: ModuleType) -> None:
    module = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    gradients = nnx.grad(lambda module: (module(jnp.ones((1, 3))) ** 2).sum())(module)
    clipped = code.gradient_clipping(gradients, 0.25)
    found: Any = jax.tree.structure(clipped)
    assert found == jax.tree.structure(gradients)
    assert norm(clipped) == pytest.approx(0.25, rel=1e-5)


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        *[(0, 0), (5, 0.5), (9, 0.9), (10, 1), (25, 0.55), (40, 0.1), (41, 0.1), (1000, 0.1)],
        (20, 0.1 + 0.9 * (1 + math.cos(math.pi / 3)) / 2),
    ],
)
def test_get_lr_cosine_schedule_rises_and_falls(
    code: ModuleType, step: int, expected: float
) -> None:
    found = float(code.get_lr_cosine_schedule(step, 1.0, 0.1, 10, 40))
    after = step - 10

    def cosine(share: float) -> float:
        return 0.1 + 0.9 * (1 + math.cos(math.pi * share)) / 2

    warmup = {
        "the warmup is one step ahead: step 0 has 0, step 10 the maximum": (step + 1) / 10,
        "the warmup begins at the minimum; it begins at 0": 0.1 + 0.9 * step / 10,
        "this is the maximum; the warmup goes up from 0": 1.0,
        "the cosine is there from step 0; before it, the warmup goes up in a line": cosine(
            after / 30
        ),
    }
    fall = {
        "after cosine_cycle_iters the rate stays at the minimum; this goes on": cosine(after / 30),
        "the cosine goes down to 0; it ends at the minimum": (cosine(min(after / 30, 1)) - 0.1)
        / 0.9,
        "the cosine counts from step 0; it begins after the warmup": cosine(min(step / 40, 1)),
        "the cosine takes cosine_cycle_iters steps after the warmup; it ends at that step": cosine(
            min(after / 40, 1)
        ),
        "this is a line; the rate falls in half a cosine": 1 - 0.9 * min(after / 30, 1),
        "a whole cosine; it is half of one, which goes from 1 to -1": cosine(2 * after / 30),
        "this is still the maximum": 1.0,
    }
    mistakes = warmup if step < 10 else fall
    different = {why: one for why, one in mistakes.items() if abs(one - expected) > 1e-3}
    check(found, expected, different, rtol=1e-9, atol=1e-12)


def test_get_lr_cosine_schedule_can_do_without_warmup(code: ModuleType) -> None:
    with explained({"ZeroDivisionError": "without warmup, warmup_iters is 0: don't divide by it"}):
        first = float(code.get_lr_cosine_schedule(0, 1.0, 0.0, 0, 4))
    assert first == pytest.approx(1), "without warmup, step 0 has the maximum"
    assert float(code.get_lr_cosine_schedule(2, 1.0, 0.0, 0, 4)) == pytest.approx(0.5)


def test_get_lr_cosine_schedule_works_in_a_compiled_step(code: ModuleType) -> None:
    compiled = jax.jit(lambda step: code.get_lr_cosine_schedule(step, 1.0, 0.1, 3, 9))
    why = (
        "inside jax.jit the step has no value yet, so neither Python's `if` nor math.cos can take"
        " it: use jnp.where and jnp.cos"
    )
    for step in (0, 2, 3, 5, 12):
        expected = float(code.get_lr_cosine_schedule(step, 1.0, 0.1, 3, 9))
        with explained({"TracerBoolConversion": why, "ConcretizationTypeError": why}):
            assert float(compiled(step)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def adamw(
    weight: np.ndarray, gradients: list[np.ndarray], rates: list[float], **other: Any
) -> np.ndarray:
    """Return a weight after a step of AdamW for each gradient, in 64 bits (algorithm 2 of
    Loshchilov & Hutter 2019); with an `other` config to tell a mistake by what it gives."""
    config = CONFIG | other
    weight, (beta1, beta2) = weight.astype(np.float64), config["betas"]
    mean = square = np.zeros_like(weight)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        gradient = gradient + config.get("l2", 0) * weight
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        change = (mean / (1 - beta1**step)) / (np.sqrt(square / (1 - beta2**step)) + config["eps"])
        weight = weight - rate * (change + config["weight_decay"] * weight)
    return weight


def wrong_adamw(gradients: list[np.ndarray], rates: list[float]) -> dict[str, np.ndarray]:
    """Return what mistakes give, by what to say."""

    def other(**config: Any) -> np.ndarray:
        return adamw(WEIGHT, gradients, rates, **config)

    return {
        "this is without weight decay, or with that of optax, 0.0001: it is in the config": other(
            weight_decay=0.0
        ),
        "weight decay is added to the gradient, as in L2; AdamW takes it off the weight": (
            other(weight_decay=0.0, l2=0.2)
        ),
        "betas are 0.9 and 0.999 whatever the config says": other(betas=[0.9, 0.999]),
        "the betas are swapped": other(betas=[0.95, 0.9]),
        "nothing moves": WEIGHT,
    }


def train(
    transform: optax.GradientTransformation, weight: np.ndarray, gradients: list[np.ndarray]
) -> np.ndarray:
    params = {"weight": jnp.asarray(weight, jnp.float32)}
    state = transform.init(params)
    for gradient in gradients:
        updates, state = transform.update(
            {"weight": jnp.asarray(gradient, jnp.float32)}, state, params
        )
        params = optax.apply_updates(params, updates)
    return np.asarray(params["weight"])


RNG = np.random.default_rng(5)
WEIGHT = RNG.normal(size=(3, 2))
GRADIENTS = [RNG.normal(size=(3, 2)) * scale for scale in (1, 5, 0.01, 2)]


def test_adamw_follows_the_paper(code: ModuleType) -> None:
    transform = code.build_optimizer_transform(CONFIG, None, None)
    rates = [0.1] * 4
    expected, mistakes = adamw(WEIGHT, GRADIENTS, rates), wrong_adamw(GRADIENTS, rates)
    check(train(transform, WEIGHT, GRADIENTS), expected, mistakes)


def test_adamw_takes_the_learning_rate_from_a_schedule(code: ModuleType) -> None:
    transform = code.build_optimizer_transform(CONFIG, None, lambda step: 0.3 / (1 + step))
    rates = [0.3, 0.15, 0.1, 0.075]
    mistakes = wrong_adamw(GRADIENTS, rates) | {
        'the schedule is not used: this has the rate "lr"': adamw(WEIGHT, GRADIENTS, [0.1] * 4),
        "the schedule is asked once; it has a rate for each step": adamw(
            WEIGHT, GRADIENTS, [0.3] * 4
        ),
        "the schedule counts steps from 1; they count from 0": adamw(
            WEIGHT, GRADIENTS, [0.15, 0.1, 0.075, 0.06]
        ),
    }
    found = train(transform, WEIGHT, GRADIENTS)
    check(found, adamw(WEIGHT, GRADIENTS, rates), mistakes)


def test_adamw_gets_clipped_gradients(code: ModuleType) -> None:
    transform = code.build_optimizer_transform(CONFIG, 0.5, lambda _: 0.1)
    clipped = [gradient * min(1, 0.5 / norm(gradient)) for gradient in GRADIENTS]
    rates = [0.1] * 4
    by_value = [np.clip(gradient, -0.5, 0.5) for gradient in GRADIENTS]
    mistakes = wrong_adamw(clipped, rates) | {
        "gradients are not clipped, or the update is instead: clipping comes before AdamW": adamw(
            WEIGHT, GRADIENTS, rates
        ),
        "each element is clipped; the norm of all together is": adamw(WEIGHT, by_value, rates),
    }
    found = train(transform, WEIGHT, GRADIENTS)
    check(found, adamw(WEIGHT, clipped, rates), mistakes)


def test_adamw_is_the_only_type(code: ModuleType) -> None:
    with pytest.raises(ValueError, match="sgd"):
        code.build_optimizer_transform(CONFIG | {"type": "sgd"}, 1.0, None)

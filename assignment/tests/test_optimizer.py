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

CONFIG: dict[str, Any] = {
    "type": "adamw",
    "lr": 0.1,
    "betas": [0.9, 0.95],
    "eps": 1e-6,
    "weight_decay": 0.2,
}


def norm(tree: Any) -> float:
    return math.sqrt(sum(float(np.square(leaf).sum()) for leaf in jax.tree.leaves(tree)))


def test_gradient_clipping_shortens_all_gradients_together(code: ModuleType) -> None:
    gradients = {"a": jnp.array([3.0, 0.0]), "b": {"c": jnp.array([[4.0]])}}
    clipped = code.gradient_clipping(gradients, 0.5)
    np.testing.assert_allclose(clipped["a"], [0.3, 0], rtol=1e-5)
    np.testing.assert_allclose(clipped["b"]["c"], [[0.4]], rtol=1e-5)


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_gradient_clipping_leaves_short_gradients(code: ModuleType, scale: float) -> None:
    gradients = [jnp.array([0.6, 0.8]) * scale]
    [clipped] = code.gradient_clipping(gradients, 1.5)
    np.testing.assert_array_equal(clipped, gradients[0])


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
    found = code.get_lr_cosine_schedule(step, 1.0, 0.1, 10, 40)
    assert float(found) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_get_lr_cosine_schedule_can_do_without_warmup(code: ModuleType) -> None:
    assert float(code.get_lr_cosine_schedule(0, 1.0, 0.0, 0, 4)) == pytest.approx(1)
    assert float(code.get_lr_cosine_schedule(2, 1.0, 0.0, 0, 4)) == pytest.approx(0.5)


def test_get_lr_cosine_schedule_works_in_a_compiled_step(code: ModuleType) -> None:
    compiled = jax.jit(lambda step: code.get_lr_cosine_schedule(step, 1.0, 0.1, 3, 9))
    for step in (0, 2, 3, 5, 12):
        expected = float(code.get_lr_cosine_schedule(step, 1.0, 0.1, 3, 9))
        assert float(compiled(step)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


def adamw(weight: np.ndarray, gradients: list[np.ndarray], rates: list[float]) -> np.ndarray:
    """Return a weight after a step of AdamW for each gradient, in 64 bits (algorithm 2 of
    Loshchilov & Hutter 2019)."""
    weight, (beta1, beta2) = weight.astype(np.float64), CONFIG["betas"]
    mean = square = np.zeros_like(weight)
    for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        mean = beta1 * mean + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        change = (mean / (1 - beta1**step)) / (np.sqrt(square / (1 - beta2**step)) + CONFIG["eps"])
        weight = weight - rate * (change + CONFIG["weight_decay"] * weight)
    return weight


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
    expected = adamw(WEIGHT, GRADIENTS, [0.1] * 4)
    np.testing.assert_allclose(train(transform, WEIGHT, GRADIENTS), expected, rtol=1e-4, atol=1e-5)


def test_adamw_takes_the_learning_rate_from_a_schedule(code: ModuleType) -> None:
    transform = code.build_optimizer_transform(CONFIG, None, lambda step: 0.3 / (1 + step))
    expected = adamw(WEIGHT, GRADIENTS, [0.3, 0.15, 0.1, 0.075])
    np.testing.assert_allclose(train(transform, WEIGHT, GRADIENTS), expected, rtol=1e-4, atol=1e-5)


def test_adamw_gets_clipped_gradients(code: ModuleType) -> None:
    transform = code.build_optimizer_transform(CONFIG, 0.5, lambda _: 0.1)
    clipped = [gradient * min(1, 0.5 / norm(gradient)) for gradient in GRADIENTS]
    expected = adamw(WEIGHT, clipped, [0.1] * 4)
    np.testing.assert_allclose(train(transform, WEIGHT, GRADIENTS), expected, rtol=1e-4, atol=1e-5)


def test_adamw_is_the_only_type(code: ModuleType) -> None:
    with pytest.raises(ValueError, match="sgd"):
        code.build_optimizer_transform(CONFIG | {"type": "sgd"}, 1.0, None)

"""Linear, Embedding, RMSNorm, silu, SwiGLU and RotaryPositionalEmbedding."""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from assignment.tests import reference

RNG = np.random.default_rng(1)
TRUNCATED_SIGMA = 0.9866
"""Standard deviation of a normal distribution with σ = 1 that is truncated at ±3."""


def random(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def check_spread(weights: jax.Array, sigma: float) -> None:
    """Check initial weights, of which there must be many."""
    values = np.asarray(weights, np.float64)
    assert abs(values.mean()) < 0.02 * sigma
    np.testing.assert_allclose(values.std(), TRUNCATED_SIGMA * sigma, rtol=0.02)
    assert 2.8 * sigma < np.abs(values).max() <= 3 * sigma * (1 + 1e-6)


def test_linear_multiplies_by_its_weights(code: ModuleType) -> None:
    linear = code.Linear(nnx.Rngs(0), 6, 4)
    assert linear.weights.get_value().shape == (6, 4)
    x, weights = random(2, 3, 6), random(6, 4)
    linear.weights.set_value(jnp.asarray(weights))
    expected = x.astype(np.float64) @ weights.astype(np.float64)
    np.testing.assert_allclose(linear(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)


def test_linear_begins_with_a_truncated_normal_distribution(code: ModuleType) -> None:
    rngs = nnx.Rngs(0)
    linear, other = code.Linear(rngs, 150, 250), code.Linear(rngs, 150, 250)
    assert isinstance(linear.weights, nnx.Param)
    check_spread(linear.weights.get_value(), np.sqrt(2 / 400))
    assert not np.array_equal(linear.weights.get_value(), other.weights.get_value())


def test_linear_has_the_dtype_that_is_asked_for(code: ModuleType) -> None:
    linear = code.Linear(nnx.Rngs(0), 4, 4, dtype=jnp.bfloat16)
    assert linear.weights.get_value().dtype == jnp.bfloat16
    assert linear(jnp.ones(4, jnp.bfloat16)).dtype == jnp.bfloat16


def test_embedding_returns_the_rows_of_tokens(code: ModuleType) -> None:
    embedding = code.Embedding(nnx.Rngs(0), 10, 4)
    table = random(10, 4)
    embedding.weights.set_value(jnp.asarray(table))
    tokens = np.array([[0, 9, 9], [3, 2, 1]])
    np.testing.assert_array_equal(embedding(jnp.asarray(tokens)), table[tokens])


def test_embedding_begins_with_a_truncated_normal_distribution(code: ModuleType) -> None:
    embedding = code.Embedding(nnx.Rngs(0), 300, 100, dtype=jnp.float32)
    assert isinstance(embedding.weights, nnx.Param)
    check_spread(embedding.weights.get_value(), 1)


def test_rmsnorm_divides_by_the_root_of_the_mean_square(code: ModuleType) -> None:
    norm = code.RMSNorm(nnx.Rngs(0), 8, eps=0.1)
    np.testing.assert_array_equal(norm.weights.get_value(), np.ones(8))
    x, scale = random(2, 3, 8), random(8)
    norm.weights.set_value(jnp.asarray(scale))
    expected = reference.rms_norm(x.astype(np.float64), scale.astype(np.float64), eps=0.1)
    np.testing.assert_allclose(norm(jnp.asarray(x)), expected, rtol=1e-5)


def test_rmsnorm_of_16_bits_does_not_overflow(code: ModuleType) -> None:
    normalized = code.RMSNorm(nnx.Rngs(0), 4)(jnp.full(4, 1000, jnp.float16))
    assert normalized.dtype == jnp.float16
    np.testing.assert_allclose(normalized, np.ones(4), rtol=1e-3)


def test_silu_multiplies_by_the_sigmoid(code: ModuleType) -> None:
    x = np.linspace(-20, 20, 41, dtype=np.float32).reshape(1, 41)
    expected = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    np.testing.assert_allclose(code.silu(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(code.silu(jnp.array([-1e4, 0.0, 1e4])), [0, 0, 1e4])


def test_silu_has_a_gradient_everywhere(code: ModuleType) -> None:
    x = np.array([-1e4, -100, -1, 0, 1, 100, 1e4])
    sigmoid = np.exp(-np.logaddexp(0, -x))
    gradient = jax.vmap(jax.grad(code.silu))(jnp.asarray(x, jnp.float32))
    assert np.isfinite(gradient).all(), (
        "for x of -100, exp(-x) overflows to infinity. x / (1 + exp(-x)) is still right, 0, but its"
        " gradient has ∞ / ∞², which is NaN: one such x, and all weights are NaN after the step"
    )
    np.testing.assert_allclose(gradient, sigmoid * (1 + x * (1 - sigmoid)), rtol=1e-5, atol=1e-7)


def test_swiglu_gates_with_w1_and_comes_back_with_w2(code: ModuleType) -> None:
    swiglu = code.SwiGLU(nnx.Rngs(0), 6, 16)
    weights = reference.randomize(swiglu)
    shapes = {name: weight.shape for name, weight in weights.items()}
    assert shapes == {"w1.weights": (6, 16), "w2.weights": (16, 6), "w3.weights": (6, 16)}
    x = random(2, 3, 6)
    expected = reference.feed_forward(x.astype(np.float64), weights)
    np.testing.assert_allclose(swiglu(jnp.asarray(x)), expected, rtol=1e-4, atol=1e-5)


def test_rope_turns_neighbouring_channels(code: ModuleType) -> None:
    rope = code.RotaryPositionalEmbedding(8, theta=100.0, max_seq_len=32)
    x, positions = random(2, 5, 8), np.array([0, 1, 2, 31, 7])
    turned = rope(jnp.asarray(x), jnp.asarray(positions))
    expected = [reference.rotate(row.astype(np.float64), positions, 100.0) for row in x]
    np.testing.assert_allclose(turned, expected, rtol=1e-4, atol=1e-5)


def test_rope_takes_positions_of_each_sequence(code: ModuleType) -> None:
    rope = code.RotaryPositionalEmbedding(4, theta=10_000.0, max_seq_len=16)
    x, positions = random(2, 3, 4), np.array([[0, 1, 2], [9, 5, 5]])
    turned = rope(jnp.asarray(x), jnp.asarray(positions))
    for row, own, result in zip(x, positions, turned, strict=True):
        expected = reference.rotate(row.astype(np.float64), own, 10_000.0)
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


def test_rope_makes_scores_depend_on_distance(code: ModuleType) -> None:
    rope = code.RotaryPositionalEmbedding(8, theta=10_000.0, max_seq_len=64)
    query, key = jnp.asarray(random(1, 8)), jnp.asarray(random(1, 8))

    def score(query_position: int, key_position: int) -> float:
        turned = rope(query, jnp.array([query_position])) * rope(key, jnp.array([key_position]))
        return float(turned.sum())

    assert score(3, 1) == pytest.approx(score(60, 58), abs=1e-4)
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-2)


def test_rope_has_caches_and_no_parameters(code: ModuleType) -> None:
    rope = code.RotaryPositionalEmbedding(8, theta=10_000.0, max_seq_len=16)
    assert not nnx.to_flat_state(nnx.state(rope, nnx.Param))
    shapes = [v.get_value().shape for _, v in nnx.to_flat_state(nnx.state(rope, nnx.Cache))]
    assert shapes == [(16, 4), (16, 4)]

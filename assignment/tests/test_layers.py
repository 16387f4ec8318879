"""Linear, Embedding, RMSNorm, silu, SwiGLU and RotaryPositionalEmbedding."""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from assignment.tests import reference
from assignment.tests.mistakes import check

RNG = np.random.default_rng(1)
TRUNCATED_SIGMA = 0.9866
"""Standard deviation of a normal distribution with σ = 1 that is truncated at ±3."""


def random(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def check_spread(weights: jax.Array, sigma: float, mistakes: dict[str, float]) -> None:
    """Check initial weights, of which there must be many. `mistakes` are standard deviations by
    what to say."""
    values = np.asarray(weights, np.float64)
    assert abs(values.mean()) < 0.02 * sigma, f"the mean is {values.mean():.3g} instead of 0"
    wrong = {
        f"{why}: σ is {other:.3g} instead of {sigma:.3g}": TRUNCATED_SIGMA * other
        for why, other in mistakes.items()
    }
    check(values.std(), TRUNCATED_SIGMA * sigma, wrong, rtol=0.02)
    assert np.abs(values).max() <= 3 * sigma * (1 + 1e-6), (
        f"the largest weight is {np.abs(values).max() / sigma:.2f} σ: the distribution is truncated"
        " at 3 σ (jax.random.truncated_normal)"
    )
    assert np.abs(values).max() > 2.8 * sigma, (
        f"the largest weight is only {np.abs(values).max() / sigma:.2f} σ: draw from a normal"
        " distribution, truncated at 3 σ"
    )


def test_linear_multiplies_by_its_weights(code: ModuleType) -> None:
    linear = code.Linear(nnx.Rngs(0), 6, 4)
    shape = linear.weights.get_value().shape
    assert shape == (6, 4), f"weights are (in_features, out_features), (6, 4), not {shape}"
    x, weights = random(2, 3, 6), random(6, 4)
    linear.weights.set_value(jnp.asarray(weights))
    expected = x.astype(np.float64) @ weights.astype(np.float64)
    np.testing.assert_allclose(linear(jnp.asarray(x)), expected, rtol=1e-5, atol=1e-5)


def test_linear_begins_with_a_truncated_normal_distribution(code: ModuleType) -> None:
    rngs = nnx.Rngs(0)
    linear, other = code.Linear(rngs, 150, 250), code.Linear(rngs, 150, 250)
    assert isinstance(linear.weights, nnx.Param)
    mistakes = {
        "this is the variance; the standard deviation is its root": 2 / 400,
        "this has 1 where the formula has 2": np.sqrt(1 / 400),
        "this counts inputs alone; the formula has inputs and outputs": np.sqrt(2 / 150),
        "this is 1 / √in_features; the formula has 2 / (in_features + out_features)": 150**-0.5,
        "this is a standard normal distribution": 1.0,
    }
    check_spread(linear.weights.get_value(), np.sqrt(2 / 400), mistakes)
    assert not np.array_equal(linear.weights.get_value(), other.weights.get_value()), (
        "two layers begin with the same weights: take a new key for each, rngs.params()"
    )


def test_linear_has_the_dtype_that_is_asked_for(code: ModuleType) -> None:
    linear = code.Linear(nnx.Rngs(0), 4, 4, dtype=jnp.bfloat16)
    assert linear.weights.get_value().dtype == jnp.bfloat16, "`dtype` is that of the weights"
    assert linear(jnp.ones(4, jnp.bfloat16)).dtype == jnp.bfloat16


def test_embedding_returns_the_rows_of_tokens(code: ModuleType) -> None:
    embedding = code.Embedding(nnx.Rngs(0), 10, 4)
    table = random(10, 4)
    embedding.weights.set_value(jnp.asarray(table))
    tokens = np.array([[0, 9, 9], [3, 2, 1]])
    found = embedding(jnp.asarray(tokens))
    assert found.shape == (2, 3, 4), (
        f"the shape is {found.shape}: (...) tokens become (..., embedding_dim), a row for each"
    )
    np.testing.assert_array_equal(found, table[tokens])


def test_embedding_begins_with_a_truncated_normal_distribution(code: ModuleType) -> None:
    embedding = code.Embedding(nnx.Rngs(0), 300, 100, dtype=jnp.float32)
    assert isinstance(embedding.weights, nnx.Param)
    mistakes = {"this is the formula of Linear; a table has 1": np.sqrt(2 / 400)}
    check_spread(embedding.weights.get_value(), 1, mistakes)


def test_rmsnorm_divides_by_the_root_of_the_mean_square(code: ModuleType) -> None:
    norm = code.RMSNorm(nnx.Rngs(0), 8, eps=0.1)
    assert (norm.weights.get_value() == 1).all(), "the scale of every channel begins with 1"
    x, scale = random(2, 3, 8), random(8)
    norm.weights.set_value(jnp.asarray(scale))
    wide, weights = x.astype(np.float64), scale.astype(np.float64)
    expected = reference.rms_norm(wide, weights, eps=0.1)
    square, mean = wide**2, wide.mean(axis=-1, keepdims=True)
    each = square.mean(axis=-1, keepdims=True)
    mistakes = {
        "the mean is subtracted, as in LayerNorm; RMSNorm doesn't": reference.rms_norm(
            wide - mean, weights, eps=0.1
        ),
        "the sum of squares: divide by the root of their mean": (
            wide / np.sqrt(square.sum(axis=-1, keepdims=True) + 0.1) * weights
        ),
        "the mean over all vectors; each has its own, over the last axis": (
            wide / np.sqrt(square.mean() + 0.1) * weights
        ),
        "the mean over the wrong axis: over positions, axis=-2; it is over channels, axis=-1": (
            wide / np.sqrt(square.mean(axis=-2, keepdims=True) + 0.1) * weights
        ),
        "the root is missing: this divides by the mean square": wide / (each + 0.1) * weights,
        "eps is added to the root; it belongs into it, to the mean square": (
            wide / (np.sqrt(each) + 0.1) * weights
        ),
        "eps is not used": wide / np.sqrt(each) * weights,
        "eps is 1e-5 whatever the argument says": reference.rms_norm(wide, weights),
        "the scale of the channels, `weights`, is missing": reference.rms_norm(
            wide, 1 + 0 * weights, 0.1
        ),
        "the scale is 1 + weights; weights begin with 1 and are the scale": reference.rms_norm(
            wide, 1 + weights, eps=0.1
        ),
    }
    check(norm(jnp.asarray(x)), expected, mistakes, rtol=1e-5)


def test_rmsnorm_of_16_bits_does_not_overflow(code: ModuleType) -> None:
    normalized = code.RMSNorm(nnx.Rngs(0), 4)(jnp.full(4, 1000, jnp.float16))
    assert (np.isfinite(normalized) & (normalized != 0)).all(), (
        "1000² is too large for float16, whose largest number is 65,504: turn x to float32 first"
    )
    assert normalized.dtype == jnp.float16, (
        f"the result is {normalized.dtype}: back to the dtype of x, float16"
    )
    check(normalized, np.ones(4), rtol=1e-3)


def test_silu_multiplies_by_the_sigmoid(code: ModuleType) -> None:
    x = np.linspace(-20, 20, 41, dtype=np.float32).reshape(1, 41)
    expected = x.astype(np.float64) / (1 + np.exp(-x.astype(np.float64)))
    mistakes = {
        "this is sigmoid(x); silu is x · sigmoid(x)": expected / np.where(x == 0, 1, x)
        + (x == 0) / 2,
        "this is relu": np.maximum(x, 0),
        "this is x · sigmoid(-x): the sign of the exponent": x - expected,
        "this is x · tanh(x)": x * np.tanh(x),
        "this is gelu": np.asarray(jax.nn.gelu(x, approximate=False)),
        "this is gelu, in its approximation": np.asarray(jax.nn.gelu(x, approximate=True)),
    }
    check(code.silu(jnp.asarray(x)), expected, mistakes, rtol=1e-5, atol=1e-7)
    found = code.silu(jnp.array([-1e4, 0.0, 1e4]))
    assert np.isfinite(found).all(), (
        f"silu of -10,000, 0 and 10,000 is {found}: exp(10,000) is infinite, and ∞ / ∞ is NaN"
    )
    np.testing.assert_array_equal(found, [0, 0, 1e4])


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
    assert shapes == {"w1.weights": (6, 16), "w2.weights": (16, 6), "w3.weights": (6, 16)}, (
        "w1 and w3 go from d_model to d_ff, w2 comes back"
    )
    x = random(2, 3, 6)
    wide = x.astype(np.float64)
    gate, up = (wide @ weights[f"{name}.weights"] for name in ("w1", "w3"))
    down, sigmoid = weights["w2.weights"], 1 / (1 + np.exp(-gate))
    product = gate * up
    mistakes = {
        "w1 and w3 are swapped: silu is of w1(x), the gate": up / (1 + np.exp(-up)) * gate @ down,
        "silu is of the product; it is of w1(x) alone": product / (1 + np.exp(-product)) @ down,
        "w3 is missing: silu(w1(x)) multiplies w3(x)": gate * sigmoid @ down,
        "silu is missing": product @ down,
        "the gate is a sigmoid: silu(w1(x)) has another factor w1(x)": sigmoid * up @ down,
        "the gate is relu instead of silu": np.maximum(gate, 0) * up @ down,
        "the gate is added instead of multiplied": (gate * sigmoid + up) @ down,
    }
    check(swiglu(jnp.asarray(x)), reference.feed_forward(wide, weights), mistakes)


def test_rope_turns_neighbouring_channels(code: ModuleType) -> None:
    rope = code.RotaryPositionalEmbedding(8, theta=100.0, max_seq_len=32)
    x, positions = random(2, 5, 8), np.array([0, 1, 2, 31, 7])
    wide = x.astype(np.float64)

    def rotated(positions: np.ndarray, theta: float = 100.0, x: np.ndarray = wide) -> np.ndarray:
        return np.stack([reference.rotate(row, positions, theta) for row in x])

    halves = [*range(0, 8, 2), *range(1, 8, 2)]
    order = np.argsort(halves)  # channel i beside i + 4
    mistakes = {
        "channels i and i + d_k / 2 are turned together, as in Llama; here it is the neighbours 2i"
        " and 2i + 1": rotated(positions, x=wide[..., order])[..., halves],
        "turned the other way: even · cos - odd · sin, and even · sin + odd · cos": rotated(
            -positions
        ),
        "the positions count from 1": rotated(positions + 1),
        "token_positions is not used: this is 0, 1, 2, …": rotated(np.arange(5)),
        "the angle is p / theta^(i / d_k): a pair's exponent is 2i / d_k": rotated(positions, 10.0),
        "theta is 10,000 whatever the argument says": rotated(positions, 10_000.0),
        "nothing is turned": wide,
        "channels i and i + d_k / 2 are turned together, and come out as neighbours: 2i and 2i + 1"
        " are"
        " a pair, before and after": rotated(positions, x=wide[..., order]),
        "the two halves of the result are joined; the channels of a pair are neighbours again": (
            rotated(positions)[..., halves]
        ),
    }
    check(rope(jnp.asarray(x), jnp.asarray(positions)), rotated(positions), mistakes)


def test_rope_takes_positions_of_each_sequence(code: ModuleType) -> None:
    rope = code.RotaryPositionalEmbedding(4, theta=10_000.0, max_seq_len=16)
    x, positions = random(2, 3, 4), np.array([[0, 1, 2], [9, 5, 5]])
    turned = rope(jnp.asarray(x), jnp.asarray(positions))
    for row, own, result in zip(x, positions, turned, strict=True):
        expected = reference.rotate(row.astype(np.float64), own, 10_000.0)
        first = reference.rotate(row.astype(np.float64), positions[0], 10_000.0)
        why = "each sequence has positions of its own; these are those of the first"
        check(result, expected, {} if (own == positions[0]).all() else {why: first})


def test_rope_makes_scores_depend_on_distance(code: ModuleType) -> None:
    rope = code.RotaryPositionalEmbedding(8, theta=10_000.0, max_seq_len=64)
    query, key = jnp.ones((1, 8)), jnp.ones((1, 8))

    def score(query_position: int, key_position: int) -> float:
        turned = rope(query, jnp.array([query_position])) * rope(key, jnp.array([key_position]))
        return float(turned.sum())

    assert score(3, 1) == pytest.approx(score(60, 58), abs=1e-4), (
        "3 and 1 are as far apart as 60 and 58, so the scores must be equal: the angle grows in"
        " proportion to the position, and query and key turn the same way"
    )
    assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-2), (
        "the score is the same at any distance"
    )


def test_rope_has_caches_and_no_parameters(code: ModuleType) -> None:
    rope = code.RotaryPositionalEmbedding(8, theta=10_000.0, max_seq_len=16)
    assert not nnx.to_flat_state(nnx.state(rope, nnx.Param)), (
        "cos and sin are nnx.Cache and not nnx.Param: an optimizer would train them"
    )
    shapes = [v.get_value().shape for _, v in nnx.to_flat_state(nnx.state(rope, nnx.Cache))]
    assert shapes == [(16, 4), (16, 4)], (
        f"cos and sin, nnx.Cache, have an angle for each position and pair, (16, 4), not {shapes}"
    )

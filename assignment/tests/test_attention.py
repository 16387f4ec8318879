"""softmax, scaled_dot_product_attention and MultiHeadSelfAttention."""

from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from assignment.tests import reference

RNG = np.random.default_rng(2)


def random(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_sums_to_1_over_an_axis(code: ModuleType, axis: int) -> None:
    x = random(3, 4, 5)
    exponentials = np.exp(x.astype(np.float64))
    expected = exponentials / exponentials.sum(axis=axis, keepdims=True)
    np.testing.assert_allclose(code.softmax(jnp.asarray(x), axis), expected, rtol=1e-5)


def test_softmax_of_large_numbers_does_not_overflow(code: ModuleType) -> None:
    found = code.softmax(jnp.array([1000.0, 1001.0, -jnp.inf]), -1)
    np.testing.assert_allclose(found, [1 / (1 + np.e), np.e / (1 + np.e), 0], rtol=1e-5)


def test_scaled_dot_product_attention_averages_values(code: ModuleType) -> None:
    query, key, value = random(2, 3, 5, 4), random(2, 3, 7, 4), random(2, 3, 7, 6)
    found = code.scaled_dot_product_attention(*map(jnp.asarray, (query, key, value)))
    scores = np.einsum("bnqh,bnkh->bnqk", query.astype(np.float64), key) / 2
    expected = np.einsum("bnqk,bnkv->bnqv", reference.softmax(scores), value)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_scaled_dot_product_attention_takes_a_mask(code: ModuleType) -> None:
    query, key, value = random(3, 5, 4), random(3, 7, 4), random(3, 7, 4)
    mask = RNG.random((3, 5, 7)) < 0.5
    mask[..., 2] = True
    found = code.scaled_dot_product_attention(*map(jnp.asarray, (query, key, value, mask)))
    for b, q in np.ndindex(3, 5):
        seen = mask[b, q]
        weights = reference.softmax(key[b, seen].astype(np.float64) @ query[b, q] / 2)
        np.testing.assert_allclose(found[b, q], weights @ value[b, seen], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("use_rope", [False, True])
def test_multihead_self_attention_is_that_of_each_head(code: ModuleType, use_rope: bool) -> None:
    layer = code.MultiHeadSelfAttention(nnx.Rngs(0), 12, 3, 100.0, 16)
    weights = reference.randomize(layer)
    names = {f"{name}_proj.weights": (12, 12) for name in "QKVO"}
    assert {name: weight.shape for name, weight in weights.items()} == names
    x = random(2, 7, 12)
    theta = 100.0 if use_rope else None
    expected = [reference.attention(row.astype(np.float64), weights, 3, theta) for row in x]
    found = reference.call(layer, jnp.asarray(x), use_rope=use_rope)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_multihead_self_attention_rotates_nothing_by_default(code: ModuleType) -> None:
    layer = code.MultiHeadSelfAttention(nnx.Rngs(0), d_model=8, num_heads=2)
    x = jnp.asarray(random(5, 8))
    plain = reference.call(layer, x)
    np.testing.assert_array_equal(plain, reference.call(layer, x, use_rope=False))
    assert not np.allclose(plain, reference.call(layer, x, use_rope=True))


def test_multihead_self_attention_sees_nothing_later(code: ModuleType) -> None:
    layer = code.MultiHeadSelfAttention(nnx.Rngs(0), 8, 2, 10_000.0, 16)

    def output(x: jax.Array) -> jax.Array:
        return layer(x, use_rope=True)[3].sum()

    gradient = np.abs(jax.jit(jax.grad(output))(jnp.asarray(random(6, 8)))).sum(axis=-1)
    assert (gradient[:4] > 0).all()
    np.testing.assert_array_equal(gradient[4:], 0)

"""softmax, scaled_dot_product_attention and MultiHeadSelfAttention."""

from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from assignment.tests import reference
from assignment.tests.mistakes import check

RNG = np.random.default_rng(2)


def random(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax_sums_to_1_over_an_axis(code: ModuleType, axis: int) -> None:
    x = random(3, 4, 5)
    exponentials = np.exp(x.astype(np.float64))
    expected = exponentials / exponentials.sum(axis=axis, keepdims=True)
    others = {
        f"this is over axis {other} whatever the argument says": (
            exponentials / exponentials.sum(axis=other, keepdims=True)
        )
        for other in (-1, 0)
        if other != axis
    }
    mistakes = {
        **others,
        "this is over all axes at once": exponentials / exponentials.sum(),
        "exp is missing": x / x.sum(axis=axis, keepdims=True),
        "not divided by the sum": exponentials,
        "not divided by the sum, though the largest is subtracted": np.exp(
            x - x.max(axis, keepdims=True)
        ),
    }
    check(code.softmax(jnp.asarray(x), axis), expected, mistakes, rtol=1e-5)


def test_softmax_of_large_numbers_does_not_overflow(code: ModuleType) -> None:
    found = code.softmax(jnp.array([1000.0, 1001.0, -jnp.inf]), -1)
    assert np.isfinite(found).all(), (
        f"softmax of 1000, 1001 and -∞ is {found}: exp(1000) is too large for float32. Subtract the"
        " largest of the axis from all of them first, which changes nothing"
    )
    np.testing.assert_allclose(found, [1 / (1 + np.e), np.e / (1 + np.e), 0], rtol=1e-5)


def test_scaled_dot_product_attention_averages_values(code: ModuleType) -> None:
    query, key, value = random(2, 3, 5, 4), random(2, 3, 7, 4), random(2, 3, 7, 6)
    found = code.scaled_dot_product_attention(*map(jnp.asarray, (query, key, value)))
    products = np.einsum("bnqh,bnkh->bnqk", query.astype(np.float64), key)

    def mean(scores: np.ndarray) -> np.ndarray:
        return np.einsum("bnqk,bnkv->bnqv", scores, value)

    over_queries = np.swapaxes(reference.softmax(np.swapaxes(products / 2, -1, -2)), -1, -2)
    mistakes = {
        "scores are not divided by the root of the head's width, √H": mean(
            reference.softmax(products)
        ),
        "scores are divided by H; it is √H": mean(reference.softmax(products / 4)),
        "scores are multiplied by √H; divide": mean(reference.softmax(products * 2)),
        "scores are divided by the root of the number of keys; it is √H, of the width": mean(
            reference.softmax(products / np.sqrt(7))
        ),
        "scores are divided by the root of the value's width; it is √H, that of a query": mean(
            reference.softmax(products / np.sqrt(6))
        ),
        "softmax is over queries; the weights of each query sum to 1 over keys, axis=-1": mean(
            over_queries
        ),
        "softmax is missing": mean(products / 2),
    }
    check(found, mean(reference.softmax(products / 2)), mistakes)


def test_scaled_dot_product_attention_takes_a_mask(code: ModuleType) -> None:
    query, key, value = random(3, 5, 4), random(3, 7, 4), random(3, 7, 4)
    mask = RNG.random((3, 5, 7)) < 0.5
    mask[..., 2], mask[..., 3] = True, False
    found = code.scaled_dot_product_attention(*map(jnp.asarray, (query, key, value, mask)))
    scores = np.einsum("bqh,bkh->bqk", query.astype(np.float64), key) / 2

    def seeing(mask: np.ndarray, hidden: float = -np.inf) -> np.ndarray:
        return reference.softmax(np.where(mask, scores, hidden)) @ value

    mistakes = {
        "the mask is not used": seeing(mask | True),
        "the mask is the other way round: True is what a query may see": seeing(~mask, -1e30),
        "hidden scores are 0, which is a score like others: they are -∞ before softmax": seeing(
            mask, 0
        ),
        "weights are hidden after softmax, so the others don't sum to 1: hide scores before it": (
            (reference.softmax(scores) * mask) @ value
        ),
        "the mask is added to the scores; where it is False they are -∞": (
            reference.softmax(scores + mask) @ value
        ),
    }
    check(found, seeing(mask), mistakes)


@pytest.mark.parametrize("use_rope", [False, True])
def test_multihead_self_attention_is_that_of_each_head(code: ModuleType, use_rope: bool) -> None:
    layer = code.MultiHeadSelfAttention(nnx.Rngs(0), 12, 3, 100.0, 16)
    weights = reference.randomize(layer)
    names = {f"{name}_proj.weights": (12, 12) for name in "QKVO"}
    assert {name: weight.shape for name, weight in weights.items()} == names, (
        "the parameters are Q_proj, K_proj, V_proj and O_proj, each a Linear from D to D"
    )
    x = random(2, 7, 12)
    found = reference.call(layer, jnp.asarray(x), use_rope=use_rope)
    assert np.isfinite(found).all(), (
        "NaN: a query that sees no key at all has the softmax of nothing but -∞. Each sees itself:"
        " query position >= key position"
    )
    theta = 100.0 if use_rope else None
    check(found, attended(x, weights, theta), wrong_attention(x, weights, theta))


def attended(
    x: np.ndarray, weights: reference.Weights, theta: float | None, **how: Any
) -> np.ndarray:
    rows = [reference.attention(row.astype(np.float64), weights, 3, theta, **how) for row in x]
    return np.stack(rows)


def wrong_attention(
    x: np.ndarray, weights: reference.Weights, theta: float | None
) -> dict[str, np.ndarray]:
    """Return what mistakes give, by what to say."""
    interleaved = np.arange(12).reshape(4, 3).T.ravel()  # head n has n, n + 3, …
    mixed = {
        name: weight if name[0] == "O" else weight[:, interleaved]
        for name, weight in weights.items()
    }
    alone = {**weights, "O_proj.weights": np.eye(12)}
    no_output = attended(x, alone, theta)
    side_by_side = no_output.reshape(2, 7, 3, 4).swapaxes(1, 2).reshape(2, 7, 12)
    found = {
        "a token sees those after it: the causal mask is missing": attended(
            x, weights, theta, ahead=7
        ),
        "a token sees the one after it: the mask is off by one, query position >= key position": (
            attended(x, weights, theta, ahead=1)
        ),
        "scores are divided by √d_model; each head divides by the root of its own width": attended(
            x, weights, theta, scale=12**-0.5
        ),
        "scores are not divided by the root of the head's width": attended(
            x, weights, theta, scale=1.0
        ),
        "head n has the outputs n, n + N, …: split D into (N, H), in this order": attended(
            x, mixed, theta
        ),
        "the outputs of the heads are not put side by side: swap N and S back before you reshape": (
            side_by_side @ weights["O_proj.weights"]
        ),
        "O_proj is missing": no_output,
        "queries and keys are swapped": attended(
            x,
            {
                **weights,
                "Q_proj.weights": weights["K_proj.weights"],
                "K_proj.weights": weights["Q_proj.weights"],
            },
            theta,
        ),
    }
    if theta:
        found |= {
            "queries and keys are not rotated, though use_rope is True": attended(x, weights, None),
            "values are rotated; only queries and keys are": attended(
                x, weights, theta, turns="QKV"
            ),
            "keys are not rotated; queries and keys are": attended(x, weights, theta, turns="Q"),
            "theta is 10,000 whatever rope_theta says": attended(x, weights, 10_000.0),
        }
    else:
        why = "queries and keys are rotated, though use_rope is False"
        found[why] = attended(x, weights, 100.0)
    return found


def test_multihead_self_attention_rotates_nothing_by_default(code: ModuleType) -> None:
    layer = code.MultiHeadSelfAttention(nnx.Rngs(0), d_model=8, num_heads=2)
    x = jnp.asarray(random(5, 8))
    plain = reference.call(layer, x)
    turned = reference.call(layer, x, use_rope=True)
    assert not np.allclose(plain, turned), "use_rope makes no difference"
    np.testing.assert_array_equal(plain, reference.call(layer, x, use_rope=False))


def test_multihead_self_attention_sees_nothing_later(code: ModuleType) -> None:
    layer = code.MultiHeadSelfAttention(nnx.Rngs(0), 8, 2, 10_000.0, 16)

    def output(x: jax.Array) -> jax.Array:
        return layer(x, use_rope=True)[3].sum()

    gradient = np.abs(jax.jit(jax.grad(output))(jnp.asarray(random(6, 8)))).sum(axis=-1)
    assert (gradient[4:] == 0).all(), (
        f"position 3 depends on later ones, {4 + np.flatnonzero(gradient[4:])}: a query sees"
        " keys at its own position and before"
    )
    assert (gradient[:4] > 0).all(), (
        f"position 3 does not depend on {np.flatnonzero(gradient[:4] == 0)}: a query sees its own"
        " position and all before it"
    )

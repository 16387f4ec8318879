"""Attention with sinks, by each kernel, against its definition in float64 NumPy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from rungs.model.attention import causal_kernel, plain_attention
from rungs.model.kernels import blockwise_attention, splash_attention, triton_attention
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.model.kernels.triton_attention import Documents
from rungs.model.layers import NO_DROPOUT
from rungs.parallel.target_device import Target, trace_for
from tests.model.test_separate_documents import starts_of
from tests.support.tiny_model import quick_jit

LENGTHS = [[30, 110], [140]]


def by_definition(scoring: Scoring, *inputs: Any) -> list[np.ndarray]:
    """Return the output and the gradients of query, key, value and sinks: a sink is the score of
    another key, with a value of zeros."""
    query, key, value, sink, dy = (np.asarray(x, np.float64) for x in inputs)
    query, key, value, dy = (x.swapaxes(1, 2) for x in (query, key, value, dy))
    group = query.shape[1] // key.shape[1]
    keys, values = (x.repeat(group, axis=1) for x in (key, value))
    scores = query @ keys.swapaxes(2, 3) * scoring.scale
    scores = np.where(scoring.mask(query.shape[2]), scores, -np.inf)
    sinks = np.broadcast_to(sink[:, None, None], (*scores.shape[:3], 1))
    scores = np.concatenate([scores, sinks], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    of_keys = weights[..., :-1]
    dweights = np.concatenate([dy @ values.swapaxes(2, 3), np.zeros(sinks.shape)], axis=-1)
    dscores = weights * (dweights - (dweights * weights).sum(axis=-1, keepdims=True))
    dproducts = dscores[..., :-1] * scoring.scale
    dkey, dvalue = (
        x.reshape(*key.shape[:2], group, *key.shape[2:]).sum(axis=2)
        for x in (dproducts.swapaxes(2, 3) @ query, of_keys.swapaxes(2, 3) @ dy)
    )
    of_heads = (of_keys @ values, dproducts @ keys, dkey, dvalue)
    return [*(x.swapaxes(1, 2) for x in of_heads), dscores[..., -1].sum(axis=(0, 2))]


def plainly(query: Array, key: Array, value: Array, scoring: Scoring) -> Array:
    mask = scoring.mask(query.shape[1])
    return plain_attention(query, key, value, mask, NO_DROPOUT, *scoring.of_scores)


def by_splash(query: Array, key: Array, value: Array, scoring: Scoring) -> Array:
    return splash_attention.pallas_attention(query, key, value, scoring, True)


def by_triton(query: Array, key: Array, value: Array, scoring: Scoring) -> Array:
    assert scoring.starts_BS is not None
    documents = Documents.of(scoring.starts_BS, key.shape[2])
    own = dataclasses.replace(scoring, starts_BS=None)
    return triton_attention.pallas_attention(query, key, value, documents, own, True)


@pytest.mark.parametrize(
    "kernel", [plainly, blockwise_attention.causal_attention, by_splash, by_triton]
)
@pytest.mark.parametrize("size", [1.0, 200.0], ids=["small", "large"])
def test_each_kernel_has_sinks(
    kernel: Callable[..., Array], size: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large sinks take all weight of some heads, and none of others."""
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", 128)
    rng, length = np.random.default_rng(0), sum(LENGTHS[0])
    query, key, value, dy = (
        jnp.asarray(rng.normal(size=(2, length, heads, 16)), jnp.float32) for heads in (4, 2, 2, 4)
    )
    sink = jnp.asarray(size * np.array([0.7, -1.0, 1.0, 0.0]), jnp.float32)
    scoring = Scoring(0.3, 40, None, jnp.asarray(starts_of(LENGTHS)))

    def attend(query: Array, key: Array, value: Array, sink: Array) -> Array:
        return kernel(query, key, value, dataclasses.replace(scoring, sink_N=sink))

    def with_gradients(*arrays: Array) -> list[Array]:
        y, pull = jax.vjp(attend, *arrays)
        return [y, *pull(dy)]

    found = quick_jit(with_gradients)(query, key, value, sink)
    expected = by_definition(scoring, query, key, value, sink, dy)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=3e-6 * np.abs(other).max())


def test_devices_take_the_kernel_that_has_sinks() -> None:
    query = jnp.ones((2, 256, 2, 64), jnp.bfloat16)
    choose = functools.partial(causal_kernel, query)
    for target, kernel in (("tpu", splash_attention), ("gpu", triton_attention)):
        with trace_for(Target(target, "9.0"), is_compiled=True):
            assert choose(Scoring(1.0, sink_N=jnp.ones(2))) is kernel

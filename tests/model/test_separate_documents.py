"""Documents that share a sequence: attention and the model compute what they compute for each
document alone."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from rungs.model.attention import causal_mask, plain_attention
from rungs.model.gpt import GPT
from rungs.model.kernels import blockwise_attention, splash_attention, triton_attention
from rungs.model.kernels.blockwise_attention import Scoring
from rungs.model.kernels.triton_attention import Documents
from rungs.model.layers import NO_DROPOUT
from tests.support.tiny_model import quick_jit, random_model

LENGTHS = [[1, 70, 33, 96], [200]], [[128, 64, 8], [5, 190, 5]]
"""Of the documents of two sequences, in two cases."""


def starts_of(lengths_by_row: Sequence[Sequence[int]]) -> np.ndarray:
    """Return starts_BS."""
    rows = [np.repeat(np.cumsum(lengths) - lengths, lengths) for lengths in lengths_by_row]
    return np.array(rows, np.int32)


def documents_of(lengths_by_row: Sequence[Sequence[int]]) -> list[tuple[int, slice]]:
    """Return the row and the place of each document."""
    return [
        (row, slice(end - length, end))
        for row, lengths in enumerate(lengths_by_row)
        for length, end in zip(lengths, np.cumsum(lengths).tolist(), strict=True)
    ]


def by_blocks(starts: Array, window: int | None, cap: float | None, *x: Array) -> Array:
    query, key, value = x
    return blockwise_attention.causal_attention(
        query, key, value, Scoring(0.3, window, cap, starts)
    )


def by_splash(starts: Array, window: int | None, cap: float | None, *x: Array) -> Array:
    query, key, value = x
    return splash_attention.pallas_attention(
        query, key, value, Scoring(0.3, window, cap, starts), True
    )


def by_triton(starts: Array, window: int | None, cap: float | None, *x: Array) -> Array:
    query, key, value = x
    documents = Documents.of(starts, key.shape[2])
    scoring = Scoring(0.3, window, cap)
    return triton_attention.pallas_attention(query, key, value, documents, scoring, True)


@functools.partial(quick_jit, static_argnums=(4, 5))
def alone(
    dy: Array, query: Array, key: Array, value: Array, window: int | None, cap: float | None
) -> tuple[Array, ...]:
    mask = causal_mask(dy.shape[1], window)
    attend = functools.partial(plain_attention, mask=mask, scale=0.3, soft_cap=cap)
    y, pull = jax.vjp(attend, query, key, value)
    return y, *pull(dy)


@pytest.mark.parametrize("kernel", [by_blocks, by_splash, by_triton])
@pytest.mark.parametrize(
    ("lengths", "window", "cap"),
    [
        (LENGTHS[0], None, None),
        (LENGTHS[0], 40, 2.0),
    ],
    ids=str,
)
def test_attention_equals_that_of_each_document_alone(
    kernel: Callable[..., Array],
    window: int | None,
    cap: float | None,
    lengths: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(splash_attention, "MAX_BLOCK", 128)
    rng, length = np.random.default_rng(0), sum(lengths[0])
    query, key, value, dy = (
        jnp.asarray(rng.normal(size=(2, length, heads, 16)), jnp.float32) for heads in (4, 2, 2, 4)
    )

    def packed(*arrays: Array) -> tuple[Array, ...]:
        own = functools.partial(kernel, jnp.asarray(starts_of(lengths)), window, cap)
        y, pull = jax.vjp(own, *arrays)
        return y, *pull(dy)

    found = quick_jit(packed)(query, key, value)
    for row, place in documents_of(lengths):
        own = (np.asarray(x)[row : row + 1, place] for x in (dy, query, key, value))
        expected = alone(*own, window, cap)
        for one, other in zip(found, expected, strict=True):
            limit = 3e-6 * np.abs(np.asarray(one)).max()
            own_part = np.asarray(one)[row : row + 1, place]
            np.testing.assert_allclose(own_part, other, rtol=0, atol=limit)


MODELS: dict[str, dict[str, Any]] = {
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal"},
    "sliding rope": {
        "positions": "rope",
        "layer_pattern": ["sliding", "global"],
        "sliding_window": 6,
        "n_kv_heads": 1,
    },
    "sinks": {"attention_sinks": True, "attention_output_gate": "head", "n_kv_heads": 1},
    "latent": {"positions": "rope", "latent_attention": {"kv_rank": 6, "rope_dim": 4}},
}
MODELS["bidirectional"] = {"positions": "rope", "bidirectional": True}
MODEL_LENGTHS = [[11, 13], [13, 11]]


@pytest.mark.parametrize(
    ("name", "drop_in_array_mask"),
    [
        ("sliding rope", True),
        ("latent", False),
        ("sinks", False),
        pytest.param("sinusoidal", True, marks=pytest.mark.long),
        ("bidirectional", False),
    ],
)
def test_the_gradient_equals_that_of_each_document_alone(
    name: str, drop_in_array_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`drop_in_array_mask`: with the mask as an array, as attention with dropout has it."""
    if drop_in_array_mask:
        monkeypatch.setattr(blockwise_attention, "causal_attention", plain_with_starts)
    model = random_model(context_length=24, n_layers=2, **MODELS[name])
    tokens, targets = np.random.default_rng(1).integers(0, model.config.vocab_size, (2, 2, 24))
    starts = starts_of(MODEL_LENGTHS)

    def loss(model: GPT, tokens: Array, targets: Array, starts: Array | None) -> Array:
        return model.summed_loss(tokens, targets, starts_BS=starts)[0]

    gradient_of = quick_jit(nnx.grad(loss))
    found = gradient_of(model, tokens, targets, starts)
    expected = jax.tree.map(np.zeros_like, found)
    for row, place in documents_of(MODEL_LENGTHS):
        alone = tokens[row : row + 1, place], targets[row : row + 1, place]
        expected = jax.tree.map(np.add, expected, gradient_of(model, *alone, None))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * max(np.abs(other).max(), 1e-3))


def plain_with_starts(query: Array, key: Array, value: Array, scoring: Scoring) -> Array:
    mask = scoring.mask(query.shape[1])
    return plain_attention(query, key, value, mask, NO_DROPOUT, *scoring.of_scores)


def test_no_gradient_crosses_from_one_document_to_another() -> None:
    model, starts = random_model(context_length=24, n_layers=2), jnp.asarray(starts_of([[10, 14]]))
    x_BSD = np.random.default_rng(1).normal(size=(1, 24, model.config.emb_dim)).astype(np.float32)

    def logits_of_second(x_BSD: Array) -> Array:
        hidden = model.hidden(starts, starts_BS=starts, embedded_BSD=x_BSD)
        return model.unembed(hidden.x_BSD)[:, 10:].sum()

    gradient = np.asarray(quick_jit(jax.grad(logits_of_second))(x_BSD))[0]
    assert np.abs(gradient[:10]).max() == 0
    assert np.abs(gradient[10:]).max(axis=1).min() > 0

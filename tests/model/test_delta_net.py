"""Gated DeltaNet: the chunked and the recurrent rule against the paper's recurrence in float64, and
documents that share a sequence."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from rungs.model.gpt import GPT
from rungs.model.kernels import gated_delta
from rungs.model.kernels.gated_delta import Operands
from tests.model.test_separate_documents import documents_of, starts_of
from tests.support import reference_delta_net
from tests.support.tiny_model import quick_jit, random_model

ROUNDING = 2e-12
"""Of values of about 10, with exponents of a few thousands: those of decays to 0."""
ROWS, KEY_HEADS, PER_KEY, KEY_DIM, VALUE_DIM = 2, 2, 3, 5, 7


def operands(length: int, dtype: str = "float64", equal_keys: bool = False) -> Operands:
    """Return random operands; their decays go from next to none to all, and β up to 2."""
    rng = np.random.default_rng(length)
    shape = ROWS, length, KEY_HEADS
    query, key = rng.normal(size=(2, *shape, KEY_DIM))
    key = np.broadcast_to(key[:, :1], key.shape) if equal_keys else key
    beta = np.ones((*shape, PER_KEY)) if equal_keys else 2 * rng.random((*shape, PER_KEY))
    arrays = (
        query,
        key / np.linalg.norm(key, axis=-1, keepdims=True),
        rng.normal(size=(*shape, PER_KEY, VALUE_DIM)),
        -np.exp(rng.normal(-4, 3, size=(*shape, PER_KEY))) * (not equal_keys),
        beta,
    )
    return Operands(*(jnp.asarray(array, dtype) for array in arrays))


def from_zeros(own: Operands, _: Array | None = None) -> Array:
    """The recurrent rule, from a state of zeros."""
    shape = len(own.key_BSKH), KEY_HEADS, PER_KEY, KEY_DIM, VALUE_DIM
    return gated_delta.recurrent(own, jnp.zeros(shape, own.key_BSKH.dtype))[0]


def chunked(own: Operands, starts_BS: Array | None = None) -> Array:
    return gated_delta.chunked(own, starts_BS)[0]


def expected(own: Operands) -> np.ndarray:
    query, key, value, log_decay, beta = (np.asarray(array, np.float64) for array in own)
    y = np.zeros(value.shape)
    for b, k, g in np.ndindex(ROWS, KEY_HEADS, PER_KEY):
        parts = query[b, :, k], key[b, :, k], value[b, :, k, g]
        decay = np.exp(log_decay[b, :, k, g])
        y[b, :, k, g] = reference_delta_net.rule(*parts, decay, beta[b, :, k, g])
    return y


@pytest.mark.parametrize("form", [chunked, from_zeros])
@pytest.mark.parametrize("length", [1, 37, 200])
def test_both_forms_equal_the_recurrence_in_float64(
    form: Callable[[Operands], Array], length: int
) -> None:
    with jax.enable_x64(True):
        own = operands(length)
        np.testing.assert_allclose(quick_jit(form)(own), expected(own), rtol=0, atol=ROUNDING)


def test_equal_tokens_lose_no_digits() -> None:
    """The system that a chunk solves is all ones then, whose powers reach 10¹⁷."""
    own = operands(64, "float32", equal_keys=True)
    np.testing.assert_allclose(quick_jit(chunked)(own), expected(own), rtol=0, atol=2e-5)


def test_the_gradient_of_the_chunked_form_is_that_of_the_recurrent_one() -> None:
    with jax.enable_x64(True):
        own = operands(150)
        dy = jnp.asarray(np.random.default_rng(1).normal(size=own.value_BSKGW.shape))

        def gradient(form: Callable[[Operands], Array]) -> Operands:
            return quick_jit(jax.grad(lambda own: (form(own) * dy).sum()))(own)

        for one, other in zip(gradient(chunked), gradient(from_zeros), strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12 * np.abs(other).max())


def test_the_state_after_chunks_is_that_after_tokens() -> None:
    with jax.enable_x64(True):
        own = operands(200)
        first = jax.tree.map(lambda x: x[:, :130], own)
        _, state = gated_delta.chunked(first)
        rest, _ = gated_delta.recurrent(jax.tree.map(lambda x: x[:, 130:], own), state)
        np.testing.assert_allclose(rest, expected(own)[:, 130:], rtol=0, atol=ROUNDING)


LENGTHS = [[1, 70, 33, 96], [64, 128, 8]]


def test_documents_equal_those_alone() -> None:
    with jax.enable_x64(True):
        own = operands(200)
        found = quick_jit(chunked)(own, jnp.asarray(starts_of(LENGTHS)))
        for row, place in documents_of(LENGTHS):
            alone = jax.tree.map(lambda x, at=place: x[:, at], own)
            wanted = expected(alone)[row]
            np.testing.assert_allclose(found[row, place], wanted, rtol=0, atol=ROUNDING)


@functools.partial(quick_jit, static_argnums=(2, 3))
def of_document(
    model_and_x: tuple[GPT, Array], starts: Array, first: int, end: int
) -> tuple[Array, Array]:
    """Return the outputs of one document, and the gradient of their sum by all inputs."""
    model, x_BSD = model_and_x

    def outputs(x_BSD: Array) -> tuple[Array, Array]:
        y_BSD = model.hidden(starts, starts_BS=starts, embedded_BSD=x_BSD).x_BSD[0, first:end]
        return jnp.sin(y_BSD).sum(), y_BSD

    gradient, y = jax.grad(outputs, has_aux=True)(x_BSD)
    return y, gradient


HYBRID = {
    **{"context_length": 160, "n_layers": 3, "layer_pattern": ["delta_net", "delta_net", "global"]},
    "delta_net": {"key_heads": 2, "key_dim": 6, "value_heads": 4, "value_dim": 5},
}


@pytest.mark.parametrize("only_delta", [True, False])
def test_documents_are_the_same_bits_whatever_others_contain(only_delta: bool) -> None:
    model = random_model(**HYBRID | ({"layer_pattern": ["delta_net"]} if only_delta else {}))
    starts = jnp.asarray(starts_of([[50, 81, 29]]))
    rng = np.random.default_rng(2)
    one, other = rng.normal(size=(2, 1, 160, model.config.emb_dim)).astype(np.float32)
    other *= 100
    other[:, 50:131] = one[:, 50:131]
    found = [of_document((model, x), starts, 50, 131) for x in (one, other)]
    (y, gradient), (other_y, other_gradient) = jax.device_get(found)
    np.testing.assert_array_equal(y, other_y)
    np.testing.assert_array_equal(gradient, other_gradient)
    assert not gradient[:, :50].any()
    assert not gradient[:, 131:].any()
    assert np.abs(gradient[0, 50:131]).max(axis=1).min() > 0

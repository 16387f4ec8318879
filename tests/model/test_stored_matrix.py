"""Matrices as generation stores them: products, rows, and what XLA makes of them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

from rungs.model.decoding import Decoder, Prompts, states_of
from rungs.model.generation import row_keys
from rungs.model.kernels.stored_matrix import OutputMajorMatrix, outputs_first
from rungs.model.sampling import GREEDY
from rungs.model.weight_formats import _aligned
from rungs.parallel.target_device import Target, trace_for
from tests.model.test_generation import varied_model

KERNEL = np.random.default_rng(0).normal(size=(3, 40, 7)).astype(np.float32)
"""Its first two axes are inputs."""


def stored(dtype: DTypeLike = jnp.bfloat16) -> OutputMajorMatrix:
    matrix_OI = outputs_first(jnp.asarray(KERNEL), 2).astype(dtype)
    return OutputMajorMatrix(matrix_OI, KERNEL.shape)


def rounded(x: np.ndarray) -> np.ndarray:
    """Return x as bfloat16 has it."""
    return np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float64)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("rows", [1, 2, 5])
def test_products_of_any_number_of_rows_have_sums_in_float32(rows: int, platform: str) -> None:
    x = np.random.default_rng(1).normal(size=(rows, 120)).astype(np.float32)
    with trace_for(Target(platform)):
        found = jax.jit(stored().multiply)(jnp.asarray(x, jnp.bfloat16))
    assert found.dtype == jnp.float32
    expected = rounded(x) @ rounded(KERNEL).reshape(120, 7)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 32, 33])
def test_float32_products(rows: int) -> None:
    x = np.random.default_rng(1).normal(size=(rows, 120)).astype(np.float32)
    found = jax.jit(stored(jnp.float32).multiply)(jnp.asarray(x))
    expected = x.astype(np.float64) @ KERNEL.astype(np.float64).reshape(120, 7)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_a_cpu_multiplies_a_few_rows_from_the_right() -> None:
    """By the compiled program: the large matrix is the left operand, which is not packed anew."""
    matrix = OutputMajorMatrix(jnp.ones((200, 96)), (96, 200))
    for rows, shape in ((4, "f32[200,4]"), (64, "f32[64,200]")):
        multiply = jax.jit(lambda x, matrix=matrix: matrix.multiply(jnp.tanh(x)) + 1)
        program = str(multiply.lower(jnp.ones((rows, 96))).compile().as_text())
        products = [line for line in program.splitlines() if " dot(" in line]
        assert len(products) == 1
        assert shape in products[0]


def test_rows_are_exact() -> None:
    found = stored().rows(jnp.asarray([[6, 0]]))
    assert np.array_equal(found[0], rounded(KERNEL).reshape(120, 7).T[[6, 0]])


def test_a_gpu_multiplies_with_rows_of_outputs_as_they_lie() -> None:
    """So no matrix is transposed for a token."""
    model = varied_model(vocab_size=301, emb_dim=96, ffn_dim=200, n_layers=1)
    with trace_for(Target("gpu")):
        decoder = Decoder(model, jnp.dtype(jnp.bfloat16))
        weights: Any = decoder.weights(states_of(model))
    outer, (layer, *_) = weights
    assert layer["feed_forward"]["up"]["kernel"].get_value().values_OI.shape == (200, 96)
    assert outer["head"]["kernel"].get_value().values_OI.shape == (301, 96)


@pytest.mark.parametrize("rows", [1, 3])
def test_decoding_in_bfloat16_makes_no_float32_copy_of_a_matrix(rows: int) -> None:
    """By the shapes in the compiled loop: of the tied table and of a feed-forward matrix."""
    sizes = {"vocab_size": 301, "emb_dim": 96, "ffn_dim": 200, "n_layers": 1}
    model = varied_model(**sizes, tied_embeddings=True)
    decoder = Decoder(model, jnp.dtype(jnp.bfloat16))
    weights = decoder.weights(states_of(model))
    nothing_B = jnp.zeros(rows, jnp.int32)
    tokens_BS = jnp.zeros((rows, 8), jnp.int32)
    prompts = Prompts(tokens_BS, nothing_B, nothing_B > 0, row_keys(0, rows), 0)
    state = decoder.initial_state(prompts, slots=16)
    decode = jax.jit(decoder.decode, static_argnames="sampling")
    lowered = decode.lower(weights, state, jnp.asarray(12), sampling=GREEDY)
    program = str(lowered.compile().as_text())
    for shape in ("301,96", "96,301", "200,96", "96,200"):
        assert f"f32[{shape}]" not in program
    assert "bf16[301,96]" in program


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8])
def test_a_table_that_was_read_by_parts_is_not_copied(dtype: DTypeLike) -> None:
    array = _aligned((101, 33), jnp.dtype(dtype))
    assert jax.device_put(array).unsafe_buffer_pointer() == array.ctypes.data

"""Matrices of 8 bits: the rounding, the products, and models that generate with them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from rungs.model.decoding import Decoder, states_of
from rungs.model.generation import Generator, Request
from rungs.model.gpt import GPT
from rungs.model.kernels.stored_matrix import Int8Matrix, outputs_first, quantize
from rungs.parallel.target_device import Target, trace_for
from tests.model.test_generation import ARCHITECTURES, PROMPTS, varied_model
from tests.support.long import long_except


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def quantize_kernel(kernel: Any, inputs: int) -> Int8Matrix:
    return quantize(outputs_first(jnp.asarray(kernel), inputs), kernel.shape)


def as_float64(matrix: Int8Matrix) -> np.ndarray:
    """Return the matrix that a quantized one stands for: (outputs, inputs)."""
    return np.asarray(matrix.integers_OI, np.float64) * np.asarray(matrix.scales_O)[:, None]


def test_each_output_is_rounded_to_255_steps_of_its_own_size() -> None:
    kernel = random(6, 4, 3) * np.array([1e-3, 1.0, 1e3])
    matrix = quantize_kernel(jnp.asarray(kernel), inputs=2)
    assert matrix.integers_OI.dtype == jnp.int8
    assert matrix.shape == kernel.shape
    flat_OI = kernel.reshape(24, 3).T
    step_O1 = np.abs(flat_OI).max(axis=1, keepdims=True) / 127
    assert np.all(np.abs(as_float64(matrix) - flat_OI) <= 0.501 * step_O1)
    assert np.abs(matrix.integers_OI).max(axis=1).tolist() == [127] * 3


def test_an_output_of_zeros_stays_zero() -> None:
    matrix = quantize_kernel(jnp.zeros((4, 2)), inputs=1)
    assert not np.any(matrix.multiply(jnp.ones((3, 4))))


@pytest.mark.parametrize("rows", [1, 5])
def test_products_are_those_of_the_rounded_matrix(rows: int) -> None:
    """Against float64; an activation is rounded to 2⁻¹⁶ of the largest one in its row."""
    x, kernel = random(rows, 300, seed=1) * 10, random(300, 70)
    matrix = quantize_kernel(jnp.asarray(kernel), inputs=1)
    expected = x.astype(np.float64) @ as_float64(matrix).T
    bound_M1 = np.abs(x).max(axis=1, keepdims=True) / (127 * 254 * 2)
    possible = 1.01 * bound_M1 * np.abs(as_float64(matrix)).sum(axis=1)
    found = np.asarray(jax.jit(matrix.multiply)(jnp.asarray(x)), np.float64)
    assert np.all(np.abs(found - expected) <= possible + 1e-6 * np.abs(expected).max())
    assert np.abs(found - expected).max() < 2e-4 * np.abs(expected).max()


def test_other_devices_multiply_in_the_dtype_of_the_activations() -> None:
    x, kernel = random(3, 40, seed=1), random(40, 7)
    matrix = quantize_kernel(jnp.asarray(kernel), inputs=1)
    with trace_for(Target("gpu")):
        found = matrix.multiply(jnp.asarray(x))
    np.testing.assert_allclose(found, x @ as_float64(matrix).T, rtol=1e-5, atol=1e-5)


def test_infinity_and_nan_stay_visible() -> None:
    matrix = quantize_kernel(jnp.asarray(random(4, 2)), inputs=1)
    for bad in (np.inf, np.nan):
        row = jnp.asarray([[1.0, bad, 2.0, 3.0]])
        assert not np.isfinite(matrix.multiply(row)).any()


def test_rows_of_a_table_are_looked_up() -> None:
    table = random(9, 5)
    matrix = quantize(jnp.asarray(table), table.shape)
    found = matrix.rows(jnp.asarray([[3, 3], [0, 8]]))
    np.testing.assert_allclose(found, as_float64(matrix)[[[3, 3], [0, 8]]], rtol=1e-6)


def round_weights(model: GPT) -> None:
    """Replace weights by those that int8 stands for, rounded here in NumPy."""
    state = nnx.state(model)
    for path, param in nnx.to_flat_state(state):
        array, name = np.asarray(param.get_value(), np.float64), path[0]
        is_tied_table = name == "token_embedding" and model.config.tied_embeddings
        if path[-1] == "kernel" and param.axes[0] != "latent":  # multiplied from both sides
            stacked = array if name == "blocks" else array[None]
            inputs = math.prod(stacked.shape[1 : 1 + param.inputs])
            rows = stacked.reshape(len(stacked), inputs, -1)
            size = np.abs(rows).max(axis=1, keepdims=True) / 127
            array = (np.round(rows / size) * size).reshape(array.shape)
        elif is_tied_table:
            size = np.abs(array).max(axis=1, keepdims=True) / 127
            array = np.round(array / size) * size
        param.set_value(jnp.asarray(array, jnp.float32))
    nnx.update(model, state)


CASES: dict[str, dict[str, Any]] = {
    **{name: ARCHITECTURES[name] for name in ("windows", "recipe", "latent")},
    "tied": {"tied_embeddings": True, "qkv_bias": True},
}


@pytest.mark.parametrize("name", long_except(["tied"], CASES))
def test_a_model_generates_as_with_the_rounded_weights(name: str) -> None:
    """Logits after a prefill and through the cache, next to a float32 model whose weights were
    rounded by NumPy: all matrices are rounded, and nothing else is."""
    model = varied_model(**CASES[name])
    texts = [[5, 1, 30, 7, 2], [1, 2, 3, 4, 5]]
    found = Generator(model, weight_format="int8").logits_after(texts, 2)
    unrounded = Generator(model).logits_after(texts, 2)
    round_weights(model)
    expected = Generator(model).logits_after(texts, 2)
    size = np.abs(expected).max()
    assert np.abs(found - expected).max() < 2e-3 * size
    assert np.abs(unrounded - expected).max() > 4 * np.abs(found - expected).max()


def test_matrices_take_a_byte_for_each_weight() -> None:
    model = varied_model(emb_dim=64)
    weights = Decoder(model, jnp.dtype(jnp.float32), "int8").weights(states_of(model))
    sizes: dict[Any, int] = {}
    for leaf in jax.tree.leaves(weights):
        sizes[leaf.dtype] = sizes.get(leaf.dtype, 0) + leaf.size
    kernels = sum(
        param.get_value().size
        for path, param in nnx.to_flat_state(nnx.state(model))
        if path[-1] == "kernel"
    )
    assert sizes[jnp.dtype(jnp.int8)] == kernels


def test_a_batch_gives_each_text_what_it_gets_alone() -> None:
    generator = Generator(varied_model(), weight_format="int8")
    alone = [generator.generate([prompt], Request(12))[0] for prompt in PROMPTS[:2]]
    assert generator.generate(PROMPTS[:2], Request(12)) == alone


def test_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="mixture of experts"):
        Generator(varied_model(**ARCHITECTURES["experts"]), weight_format="int8")

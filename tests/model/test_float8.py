"""Matmuls in FP8, beside NumPy's float64 and the casts of ml_dtypes."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from rungs.common.errors import UserError
from rungs.model.kernels import float8
from rungs.model.kernels.float8 import Float8Matmul
from rungs.parallel.target_device import Target, trace_for
from tests.support.configs import train_config

ROWS, INPUTS, OUTPUTS = 24, 40, 16
CASTS = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
LARGEST = 448.0, 448.0, 57344.0


def scale_of(amax: float, tensor: int) -> float:
    """The least power of two above amax ÷ the largest number."""
    return float(2.0 ** (np.floor(np.log2(amax / LARGEST[tensor])) + 1))


def rounded(x: np.ndarray, scale: float, tensor: int) -> np.ndarray:
    scaled = np.clip(x.astype(np.float64) / scale, -LARGEST[tensor], LARGEST[tensor])
    return scaled.astype(np.float32).astype(CASTS[tensor]).astype(np.float64) * scale


def samples(seed: int, *shape: int, size: float) -> np.ndarray:
    """Random numbers of bfloat16."""
    values = np.random.default_rng(seed).normal(size=shape) * size
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize(("dtype", "within"), [("float32", 1e-6), ("bfloat16", 2e-2)])
def test_a_matmul_and_both_gradients_are_those_of_the_rounded_tensors(
    dtype: Any, within: float
) -> None:
    """The scales are those for half of what the tensors have, so that some numbers are too large.
    A sum of bfloat16 products may be written in bfloat16: 2⁻⁸ of the largest result."""
    x, kernel = samples(0, ROWS, INPUTS, size=3), samples(1, INPUTS, OUTPUTS, size=0.1)
    g = samples(2, ROWS, OUTPUTS, size=1e-5)
    scales = [scale_of(np.abs(a).max() / 2, tensor) for tensor, a in enumerate((x, kernel, g))]
    parameter = nnx.Param(jnp.asarray(kernel)[None], axes=("emb", "ffn"), inputs=1)
    stacked = Float8Matmul(parameter, jnp.array([scales], jnp.float32))
    graph, state = nnx.split(stacked)
    state = jax.tree.map(lambda array: array[0], state)

    def y(x: jax.Array, kernel: jax.Array, observed: jax.Array) -> jax.Array:
        matmul = nnx.merge(graph, state, copy=True)
        matmul.observed.set_value(observed)
        return matmul(x, kernel, jnp.float32)

    @jax.jit
    def all_of(x: jax.Array, kernel: jax.Array, g: jax.Array) -> Any:
        result, pull = jax.vjp(y, x, kernel, jnp.zeros(2))
        return result, *pull(g)

    found = [np.asarray(a, np.float64) for a in all_of(jnp.asarray(x, dtype), kernel, g)]
    qx, qk, qg = (rounded(a, scales[tensor], tensor) for tensor, a in enumerate((x, kernel, g)))
    expected = qx @ qk, qg @ qk.T, qx.T @ qg
    for one, other in zip(found, expected, strict=False):
        np.testing.assert_allclose(one, other, rtol=0, atol=within * np.abs(other).max())
    np.testing.assert_array_equal(found[3], [np.abs(x).max(), np.abs(g).max()])
    exact = np.abs(expected[0] - x.astype(np.float64) @ kernel).max() / np.abs(expected[0]).max()
    assert exact > 0.02  # so rounding to 8 bits would be missed


@pytest.mark.parametrize("tensor", range(3))
def test_numbers_are_rounded_as_ml_dtypes_does(tensor: int) -> None:
    random = np.random.default_rng(tensor)
    x = random.normal(size=10_000) * np.exp2(random.uniform(-24, 18, 10_000))
    x = x.astype(np.float32)
    found = jax.jit(lambda x: float8.quantize(x, jnp.float32(0.25), tensor))(x)
    np.testing.assert_array_equal(np.asarray(found, np.float64) / 4, rounded(x, 0.25, tensor))


def test_what_is_not_finite_is_not_hidden() -> None:
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1e30])
    found = np.asarray(float8.quantize(x, jnp.float32(1), float8.GRADIENT), np.float32)
    assert np.isnan(found).tolist() == [True, True, True, False]
    assert found[3] == LARGEST[float8.GRADIENT]


def test_scales_are_powers_of_two_that_fit_the_amaxes() -> None:
    amaxes = np.exp2(np.random.default_rng(0).uniform(-30, 10, (100, 3))).astype(np.float32)
    scales = np.asarray(float8.scales_of(jnp.asarray(amaxes)), np.float64)
    expected = [[scale_of(a, tensor) for tensor, a in enumerate(row)] for row in amaxes]
    np.testing.assert_array_equal(scales, expected)
    scaled = amaxes / scales / np.array(LARGEST)
    assert ((scaled > 0.499) & (scaled <= 1)).all()
    nothing = np.asarray(float8.scales_of(jnp.zeros(3)), np.float64)
    first = [scale_of(a, tensor) for tensor, a in enumerate(float8.FIRST_AMAX_R)]
    np.testing.assert_array_equal(nothing, first)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (Target("gpu", "9.0"), None),
        (Target("gpu", "8.9"), None),
        (Target("gpu", "12.0"), None),
        (Target("cpu"), None),
        (Target("gpu", "8.6"), "from compute capability 8.9, this one has 8.6"),
        (Target("gpu", "gfx942"), "only NVIDIA GPUs"),
        (Target("tpu"), "only NVIDIA GPUs"),
    ],
)
def test_devices_without_fp8_are_refused(target: Target, reason: str | None) -> None:
    train = train_config(matmul_dtype="float8")
    with trace_for(target):
        float8.check_device(train_config())
        if reason is None:
            float8.check_device(train)
            return
        with pytest.raises(UserError, match=f"matmul_dtype.*{reason}"):
            float8.check_device(train)

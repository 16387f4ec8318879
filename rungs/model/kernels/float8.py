"""Matmul of activations with a weight matrix in FP8 (Micikevicius et al. 2022,
https://arxiv.org/abs/2209.05433): activations and weights in E4M3, gradients in E5M2, each divided
by a per-tensor scale before it is rounded to 8 bits.

Scaling is delayed (section 3): scales come from the largest absolute values ("amaxes") of earlier
steps. They are powers of two, so an 8-bit number times its scale is exact in bfloat16: a CPU
emulates FP8 by a matmul of such products with the same rounding; on GPUs XLA turns it into
cuBLASLt's FP8 matmul with these scales.

Axes: M rows, I inputs, O outputs; R the three tensors of a matmul, L layers."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from rungs.common.errors import UserError
from rungs.config.optimization_config import OptimizationConfig
from rungs.model.kernels.matmul import rounded_dtype, sum_over_rows
from rungs.model.kernels.stored_matrix import dot
from rungs.parallel import collectives, target_device

INPUT, WEIGHT, GRADIENT = range(3)
"""The tensors of a matmul: x, the matrix, and the gradient of the result."""
DTYPES_R = jnp.float8_e4m3fn, jnp.float8_e4m3fn, jnp.float8_e5m2
LARGEST_R = tuple(float(jnp.finfo(dtype).max) for dtype in DTYPES_R)
FIRST_AMAX_R = 448.0, 1.0, 2.0**-4
"""Initial amaxes, before any step. Gradients of a mean over many tokens are tiny; from here down,
E5M2 has 30 binary orders of magnitude."""
LEAST_CAPABILITY = 8, 9
"""First NVIDIA compute capability with FP8 matmuls (Ada; Hopper is 9.0)."""

_PRECISE = jax.lax.Precision.HIGHEST
"""Makes cuBLASLt accumulate gradients in full precision; by default it uses fewer bits."""


class Observed(nnx.Variable):
    """Zeros whose gradient carries a matmul's amaxes, of x and of the gradient of y."""


class Float8Matmul(nnx.Module):
    """A linear layer's matmul in FP8, for one step. In the blocks, variables and arguments (the
    layers' kernels and scales_LR) have a leading axis L."""

    def __init__(self, kernel: nnx.Param, scales_LR: Array) -> None:
        kernels = kernel.get_value()
        scales_L = scales_LR[:, WEIGHT].reshape(-1, *(1,) * (kernels.ndim - 1))
        quantized = jax.lax.optimization_barrier(quantize(kernels, scales_L, WEIGHT))
        self.matrix = nnx.Variable(quantized, axes=kernel.axes, inputs=kernel.inputs)
        self.scales = nnx.Variable(scales_LR)
        self.observed = Observed(jnp.zeros((len(scales_LR), 2)))

    def __call__(self, x_MI: Array, kernel_IO: Array, dtype: DTypeLike) -> Array:
        """Return x · matrix: y_MO, in `dtype`. `kernel_IO`, from which the matrix was quantized, is
        not read but gets the matrix's gradient."""
        matrix_IO = self.matrix.get_value().reshape(kernel_IO.shape)
        operands = x_MI, kernel_IO, matrix_IO, self.scales[...], self.observed[...]
        dtypes = Dtypes(dtype, x_MI.dtype, kernel_IO.dtype)
        return _matmul(dtypes, *collectives.to_common_varying(*operands))


def scales_of(amaxes_R: Array) -> Array:
    """Return the scales for tensors with these amaxes, along the last axis R: the least power of
    two above amax ÷ the dtype's largest number; 0 if the amax is 0."""
    seen_R = jnp.where(amaxes_R > 0, amaxes_R, jnp.array(FIRST_AMAX_R))
    _, exponents_R = jnp.frexp(seen_R / jnp.array(LARGEST_R))
    return jnp.ldexp(jnp.float32(1), exponents_R)


def quantize(x: Array, scale: Array, tensor: int) -> Array:
    """Return x ÷ scale in the 8-bit dtype of `tensor`, an index in R. Overflow saturates; infinity
    becomes NaN, which the step detects."""
    scaled, largest = x.astype(jnp.float32) / scale, LARGEST_R[tensor]
    clipped = jnp.where(jnp.isfinite(scaled), jnp.clip(scaled, -largest, largest), jnp.nan)
    return clipped.astype(DTYPES_R[tensor])


def amax(x: Array, axis: tuple[int, ...] | None = None) -> Array:
    """Return the largest absolute value, in float32."""
    return jnp.max(jnp.abs(x), axis=axis).astype(jnp.float32)


def check_device(train: OptimizationConfig) -> None:
    """Raise UserError if a run uses FP8 and the target device can't."""
    if train.uses_float8 and (reason := _reason_against(target_device.target())):
        raise UserError(f'train.json: matmul_dtype: "float8": {reason}; remove it')


def _reason_against(target: target_device.Target) -> str | None:
    if target.platform == "cpu":  # emulates it
        return None
    numbers = target.compute_capability.split(".")
    if target.platform != "gpu" or not all(map(str.isdigit, numbers)):
        return "only NVIDIA GPUs multiply in FP8"
    if tuple(map(int, numbers)) < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        has = target.compute_capability
        return f"GPUs multiply in FP8 from compute capability {least}, this one has {has}"
    return None


class Dtypes(NamedTuple):
    """Dtypes of a matmul's result and of its two gradients."""

    y: DTypeLike
    x: DTypeLike
    kernel: DTypeLike


class Residuals(NamedTuple):
    """Residuals for the backward pass."""

    quantized_MI: Array
    matrix_IO: Array
    scales_R: Array
    amax: Array
    """Of x."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(
    dtypes: Dtypes,
    x_MI: Array,
    kernel_IO: Array,
    matrix_IO: Array,
    scales_R: Array,
    observed: Array,
) -> Array:
    return _forward(dtypes, x_MI, kernel_IO, matrix_IO, scales_R, observed)[0]


def _forward(
    dtypes: Dtypes, x_MI: Array, _: Array, matrix_IO: Array, scales_R: Array, __: Array
) -> tuple[Array, Residuals]:
    quantized_MI = quantize(x_MI, scales_R[INPUT], INPUT)
    left_MI = _scaled(quantized_MI, scales_R[INPUT], dtypes.x)
    right_IO = _scaled(matrix_IO, scales_R[WEIGHT], dtypes.x)
    y_MO = dot(left_MI, right_IO, 1, 0, dtypes.y)
    return y_MO, Residuals(quantized_MI, matrix_IO, scales_R, amax(x_MI))


def _backward(
    dtypes: Dtypes, kept: Residuals, gradient_MO: Array
) -> tuple[Array, Array, None, None, Array]:
    gradient_MO, scales_R = gradient_MO.astype(dtypes.x), kept.scales_R
    observed = jnp.stack([kept.amax, amax(gradient_MO)])
    quantized_MO = quantize(gradient_MO, scales_R[GRADIENT], GRADIENT)
    gradient_MO = _scaled(quantized_MO, scales_R[GRADIENT], dtypes.x)
    matrix_IO = _scaled(kept.matrix_IO, scales_R[WEIGHT], dtypes.x)
    written = rounded_dtype(dtypes.x)
    x_gradient_MI = dot(gradient_MO, matrix_IO, 1, 1, written, _PRECISE)
    x_MI = _scaled(kept.quantized_MI, scales_R[INPUT], dtypes.x)
    kernel_gradient_IO = sum_over_rows(x_MI, gradient_MO, written, _PRECISE)
    found = x_gradient_MI.astype(dtypes.x), kernel_gradient_IO.astype(dtypes.kernel)
    return *found, None, None, observed


_matmul.defvjp(_forward, _backward)


def _scaled(quantized: Array, scale: Array, dtype: DTypeLike) -> Array:
    """Return the values of an 8-bit tensor. Without the barrier XLA, which may keep excess
    precision, would skip the rounding to 8 bits."""
    return jax.lax.optimization_barrier(quantized).astype(dtype) * scale.astype(dtype)

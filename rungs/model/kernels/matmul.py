"""Matmul of activations with a weight matrix, with its own derivative. The one that JAX derives for
`plain_matmul` gives the same result, but slowly: with a compute dtype narrower than float32 it
multiplies a float32 gradient in float32; and XLA's CPU compiler calls its fast library only for
sums over the last axis in memory of the left operand, which a weight's gradient is not.

Axes: M rows, I inputs, O outputs."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.typing import DTypeLike

from rungs.model.kernels.stored_matrix import StoredMatrix, dot
from rungs.parallel import collectives, target_device


def plain_matmul(x_MI: Array, kernel_IO: Array, dtype: DTypeLike = jnp.float32) -> Array:
    """Return x · kernel: y_MO, in `dtype`, from operands in the dtype of x; sums are float32."""
    return dot(x_MI, kernel_IO.astype(x_MI.dtype), 1, 0, dtype)


def matmul(x_MI: Array, kernel_IO: Array | StoredMatrix, dtype: DTypeLike = jnp.float32) -> Array:
    """Like `plain_matmul`, with the backward pass also in the dtype of x. A stored matrix
    multiplies in its own way, in float32, and has no derivative."""
    if isinstance(kernel_IO, StoredMatrix):
        return kernel_IO.multiply(x_MI)
    return _matmul(dtype, *collectives.to_common_varying(x_MI, kernel_IO))


def rounded_dtype(dtype: DTypeLike) -> DTypeLike:
    """Return the output dtype of a matmul whose result will be rounded to `dtype`, possibly after
    adding a bias, which is one rounding more. On a GPU the next kernel would read twice as much
    from memory; elsewhere 16-bit output gains little or is slower."""
    return dtype if target_device.platform() == "gpu" else jnp.float32


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(dtype: DTypeLike, x_MI: Array, kernel_IO: Array) -> Array:
    return plain_matmul(x_MI, kernel_IO, dtype)


def _forward(dtype: DTypeLike, x_MI: Array, kernel_IO: Array) -> tuple[Array, tuple[Array, Array]]:
    return plain_matmul(x_MI, kernel_IO, dtype), (x_MI, kernel_IO)


def _backward(
    _: DTypeLike, residuals: tuple[Array, Array], gradient_MO: Array
) -> tuple[Array, Array]:
    x_MI, kernel_IO = residuals
    gradient_MO = gradient_MO.astype(x_MI.dtype)
    x_gradient_dtype = rounded_dtype(x_MI.dtype)
    x_gradient_MI = dot(gradient_MO, kernel_IO.astype(x_MI.dtype), 1, 1, x_gradient_dtype)
    kernel_gradient_IO = sum_over_rows(x_MI, gradient_MO)
    return x_gradient_MI.astype(x_MI.dtype), kernel_gradient_IO.astype(kernel_IO.dtype)


_matmul.defvjp(_forward, _backward)


def sum_over_rows(
    left_MI: Array,
    right_MO: Array,
    dtype: DTypeLike = jnp.float32,
    precision: jax.lax.Precision | None = None,
) -> Array:
    """Return leftᵀ · right, in `dtype`. On a CPU the narrower operand is transposed in memory.
    Without the barriers XLA would fold the transposes into another form of matmul, which fails for
    some forms in bfloat16."""
    if left_MI.shape[1] <= right_MO.shape[1]:
        left_IM = transpose_in_memory(left_MI)
        return target_device.cpu_barrier(dot(left_IM, right_MO, 1, 0, dtype, precision))
    right_OM = transpose_in_memory(right_MO)
    return target_device.cpu_barrier(dot(right_OM, left_MI, 1, 0, dtype, precision)).T


def transpose_in_memory(x: Array) -> Array:
    """Return x with its last two axes swapped, on a CPU also in memory."""
    swapped = x.swapaxes(-1, -2)
    if target_device.platform() != "cpu":
        return swapped
    return target_device.cpu_barrier(with_layout_constraint(swapped, Layout(tuple(range(x.ndim)))))


def sum_over_last_axis(x: Array) -> Array:
    """Return the sum over the last axis, kept, in float32. Without the barrier, XLA's CPU compiler
    would write a float32 copy of a 16-bit x that others also read."""
    return target_device.cpu_barrier(x).astype(jnp.float32).sum(axis=-1, keepdims=True)

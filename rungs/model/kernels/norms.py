"""Layer norm and RMS norm over the last axis, computed in float32, with their own derivative on
GPUs. For the one that JAX derives, XLA's GPU compiler writes a float32 array of the size of x that
the gradients of x, scale and bias all read. Here each row's gradient takes one pass over x and y's
gradient, and the sums over rows another."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rungs.model.remat import save_for_backward
from rungs.parallel import collectives, target_device
from rungs.parallel.sharding import TENSOR


class Norm(NamedTuple):
    """Kind of norm."""

    epsilon: float
    """Added to the variance."""
    is_centered: bool
    """Whether the mean is subtracted: layer norm rather than RMS norm."""


def split_rms_norm(x: Array, epsilon: float, width: int, *scale: Array) -> Array:
    """Like an RMS norm of `width` elements, which are split over devices along TENSOR: x and scale
    have this device's."""
    x_float32 = x.astype(jnp.float32)
    square = collectives.psum(jnp.square(x_float32).sum(axis=-1, keepdims=True), TENSOR)
    factor = save_for_backward(jax.lax.rsqrt(square / width + epsilon))
    normalized = x_float32 * collectives.to_varying(factor, TENSOR)
    return _scaled(normalized, scale).astype(x.dtype)


def normalize(norm: Norm, x: Array, *vectors: Array) -> Array:
    """Return (x − mean) / √(variance + ε) · scale + bias (layer norm, Ba et al. 2016) or x / √(mean
    of x² + ε) · scale (RMS norm, Zhang & Sennrich 2019), in the dtype of x. `vectors` are the scale
    and the bias, the scale, or nothing, to only normalize x."""
    if target_device.platform() != "gpu":
        return plain_norm(norm, x, *vectors)
    return _with_own_derivative(norm, *collectives.to_common_varying(x, *vectors))


def plain_norm(norm: Norm, x: Array, *vectors: Array) -> Array:
    """Like `normalize`, with JAX's derivative."""
    return _scaled(_normalize(norm, x)[0], vectors).astype(x.dtype)


class Statistics(NamedTuple):
    """Mean and factor of each row, with the last axis kept."""

    mean: Array | None
    """None without centering."""
    factor: Array
    """1 / √(mean of (x − mean)² + ε)."""

    def normalize(self, x: Array) -> Array:
        """Return (x − mean) · factor in float32."""
        return _minus(x.astype(jnp.float32), self.mean) * self.factor


def _normalize(norm: Norm, x: Array) -> tuple[Array, Statistics]:
    x = x.astype(jnp.float32)
    mean = x.mean(axis=-1, keepdims=True) if norm.is_centered else None
    variance = jnp.square(_minus(x, mean)).mean(axis=-1, keepdims=True)
    statistics = Statistics(mean, jax.lax.rsqrt(variance + norm.epsilon))
    return statistics.normalize(x), statistics


def _minus(x: Array, mean: Array | None) -> Array:
    return x if mean is None else x - mean


def _scaled(x: Array, vectors: tuple[Array, ...]) -> Array:
    if not vectors:
        return x
    scale, *bias = vectors
    return sum(bias, x * scale.astype(jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _with_own_derivative(norm: Norm, x: Array, *vectors: Array) -> Array:
    return plain_norm(norm, x, *vectors)


def _forward(norm: Norm, x: Array, *vectors: Array) -> tuple[Array, Any]:
    normalized, statistics = _normalize(norm, x)
    saved = jax.tree.map(save_for_backward, statistics)
    return _scaled(normalized, vectors).astype(x.dtype), (x, vectors, saved)


def _backward(norm: Norm, residuals: Any, gradient: Array) -> tuple[Array, ...]:
    x, vectors, statistics = residuals
    normalized = statistics.normalize(x)
    scaled = _scaled(gradient.astype(jnp.float32), vectors[:1])
    across = scaled.mean(axis=-1, keepdims=True) if norm.is_centered else 0.0
    along = (scaled * normalized).mean(axis=-1, keepdims=True)
    x_gradient = (statistics.factor * (scaled - across - normalized * along)).astype(x.dtype)

    # Without the barrier XLA would compute these sums in the kernel above, which writes its input.
    x, gradient, statistics = jax.lax.optimization_barrier((x, gradient, statistics))
    gradient = gradient.astype(jnp.float32)
    summands = gradient * statistics.normalize(x), gradient
    rows = tuple(range(x.ndim - 1))
    sums = (summand.sum(rows) for summand in summands[: len(vectors)])
    return x_gradient, *(s.astype(v.dtype) for s, v in zip(sums, vectors, strict=True))


_with_own_derivative.defvjp(_forward, _backward)

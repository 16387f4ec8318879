"""The parts that a decoder is made of: parameters, projections, embeddings, norms, dropout.

Each parameter is an `nnx.Param` declared with two pieces of metadata that the optimizer and the
mesh go by: `axes`, the names of its axes (the stacked layers' axis left out), and `inputs`, how
many of them a product sums over (0 for biases and norms).
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from model_config import ModelConfig

Axes = dict[str, int]
Initializer = Callable[[Array, tuple[int, ...], int], Array]
"""From key, shape and the number of input axes to a parameter's first value."""


class Dropout(NamedTuple):
    """Dropout by explicit key, so that no mask depends on anything but step, microbatch, layer."""

    rate: float
    key: Array | None = None

    def fold(self, number: int | Array) -> "Dropout":
        """Another dropout, with masks of its own for each `number`."""
        return (
            self if self.key is None else Dropout(self.rate, jax.random.fold_in(self.key, number))
        )

    def __call__(self, x: Array) -> Array:
        """Zero each element with probability `rate`, scale the others by 1/(1 − rate)."""
        if self.key is None or not self.rate:
            return x
        kept = jax.random.bernoulli(self.key, 1 - self.rate, x.shape)
        return jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


NO_DROPOUT = Dropout(0.0)


class Linear(nnx.Module):
    """y = x · kernel + bias, over named axes: the last axes of x are `inputs`, those of y
    `outputs`. Products are summed in float32 and rounded to the type of x.

    Attributes:
        low_rank: what low-rank adaptation adds to it, where there is one; see `lora.py`.
    """

    def __init__(
        self, inputs: Axes, outputs: Axes, init: Initializer, key: Array, bias: bool = True
    ) -> None:
        self.kernel = matrix(inputs, outputs, init, key)
        self.bias = vector(outputs, 0.0) if bias else None
        self.low_rank: LowRank | None = nnx.data(None)

    def __call__(self, x: Array) -> Array:
        y = product(x, self.kernel)
        if self.low_rank is not None:
            y = y + self.low_rank(x)
        return (y if self.bias is None else y + self.bias[...]).astype(x.dtype)


class LowRankParam(nnx.Param):
    """A parameter of a low-rank addition, so that it can be trained alone."""


class LowRank(nnx.Module):
    """x · A · B · scale: a projection of low rank (Hu et al. 2021, section 4.1).

    Args:
        down: A, from the input axes to the rank.
        up: B, from the rank to the output axes.
        scale: alpha ÷ rank.
    """

    def __init__(self, down: LowRankParam, up: LowRankParam, scale: float) -> None:
        self.down, self.up, self.scale = down, up, scale

    def __call__(self, x: Array) -> Array:
        """In float32."""
        return product(product(x, self.down).astype(x.dtype), self.up) * self.scale


class Embedding(nnx.Module):
    """A table with one row of `width` for each index."""

    def __init__(self, rows: Axes, width: Axes, init: Initializer, key: Array) -> None:
        self.embedding = matrix(rows, width, init, key)

    def __call__(self, indices: Array) -> Array:
        """The rows, in float32."""
        return rows_of(self.embedding[...], indices).astype(jnp.float32)

    def similarity(self, x_BSD: Array) -> Array:
        """x · each row, in float32: what a head tied to the embedding computes."""
        table = self.embedding[...].astype(x_BSD.dtype)
        return jnp.einsum("...d,vd->...v", x_BSD, table, preferred_element_type=jnp.float32)


class LayerNorm(nnx.Module):
    """(x − mean) / √(variance + ε) · scale + bias over the last axis (Ba et al. 2016), computed
    in float32."""

    def __init__(self, width: Axes, epsilon: float) -> None:
        self.scale = vector(width, 1.0)
        self.bias = vector(width, 0.0)
        self.epsilon = epsilon

    def __call__(self, x_BSD: Array) -> Array:
        x = x_BSD.astype(jnp.float32)
        mean = x.mean(axis=-1, keepdims=True)
        variance = jnp.square(x - mean).mean(axis=-1, keepdims=True)
        y = (x - mean) * jax.lax.rsqrt(variance + self.epsilon)
        return (y * self.scale[...] + self.bias[...]).astype(x_BSD.dtype)


class RMSNorm(nnx.Module):
    """x / √(mean of x² + ε) · (offset + scale) over the last axis (Zhang & Sennrich 2019),
    computed in float32. offset 1, with a scale that starts at 0, is Gemma's form."""

    def __init__(self, width: Axes, epsilon: float, offset: float = 0.0) -> None:
        self.scale = vector(width, 1.0 - offset)
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x_BSD: Array) -> Array:
        x = x_BSD.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].astype(jnp.float32)
        return (y * (self.offset + scale if self.offset else scale)).astype(x_BSD.dtype)


Norm = LayerNorm | RMSNorm


def make_norm(config: ModelConfig, width: Axes) -> Norm | None:
    """The norm the config names, or none."""
    if config.norm == "none":
        return None
    if config.norm == "layer_norm":
        return LayerNorm(width, config.norm_epsilon)
    return RMSNorm(width, config.norm_epsilon, float(config.norm == "rms_norm_plus_one"))


def normed(norm: Norm | None, x_BSD: Array) -> Array:
    """x through the norm, where there is one."""
    return x_BSD if norm is None else norm(x_BSD)


def product(x: Array, matrix: nnx.Param) -> Array:
    """x times a matrix, over as many axes as it has inputs, summed in float32."""
    summed = matrix.inputs
    over = (tuple(range(x.ndim - summed, x.ndim)), tuple(range(summed)))
    kernel = matrix[...].astype(x.dtype)
    return jax.lax.dot_general(x, kernel, (over, ((), ())), preferred_element_type=jnp.float32)


def rows_of(table: Array, indices: Array) -> Array:
    """Rows of a table. Those of 16 bits are moved as integers: XLA's CPU compiler makes a float32
    copy of the whole table before it takes bfloat16 rows."""
    if table.dtype != jnp.bfloat16:
        return table[indices]
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)[indices]
    return jax.lax.bitcast_convert_type(bits, table.dtype)


def matrix(inputs: Axes, outputs: Axes, init: Initializer, key: Array) -> nnx.Param:
    """A float32 parameter that a product with x sums over the `inputs` axes of."""
    shape = (*inputs.values(), *outputs.values())
    return nnx.Param(init(key, shape, len(inputs)), axes=(*inputs, *outputs), inputs=len(inputs))


def vector(axes: Axes, value: float) -> nnx.Param:
    """A float32 parameter that is added or multiplied, every element `value` at first."""
    values = jnp.full(tuple(axes.values()), value, jnp.float32)
    return nnx.Param(values, axes=tuple(axes), inputs=0)


def initializer(config: ModelConfig, into_residual: bool = False) -> Initializer:
    """How the config starts a weight matrix.

    Args:
        into_residual: the matrix writes into the residual stream; GPT-2 starts those smaller, so
            that the sum of 2·n_layers of them keeps its size (Radford et al. 2019, section 2.3).
    """
    if config.init == "truncated_normal":
        return glorot_truncated_normal
    scale = 0.02 / math.sqrt(2 * config.n_layers) if into_residual else 0.02
    return functools.partial(scaled_normal, scale=scale)


def scaled_normal(key: Array, shape: tuple[int, ...], inputs: int, *, scale: float) -> Array:
    """Normal with σ = `scale`, whatever the shape."""
    del inputs
    return scale * jax.random.normal(key, shape)


def glorot_truncated_normal(key: Array, shape: tuple[int, ...], inputs: int) -> Array:
    """Normal with σ² = 2/(in + out), cut at ±3σ (after Glorot & Bengio 2010)."""
    fan_in, fan_out = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    sigma = math.sqrt(2 / (fan_in + fan_out))
    return sigma * jax.random.truncated_normal(key, -3, 3, shape)

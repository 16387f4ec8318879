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

from rungs.config.model_config import ModelConfig
from rungs.model.kernels import matmul
from rungs.model.remat import save_for_backward
from rungs.parallel import collectives
from rungs.parallel.names import TENSOR

SPLIT_AXES = ("heads", "ffn", "vocab")
"""Array axes that the devices along the tensor axis share, in modes with more than one."""

Axes = dict[str, int]
Initializer = Callable[[Array, tuple[int, ...], int], Array]
"""From key, shape and the number of input axes to a parameter's first value."""


class Dropout(NamedTuple):
    """Dropout with a random key for each sequence, so that a mask depends on nothing but the
    sequence's place in the run, the layer and the place in it: not on how a batch is divided."""

    rate: float
    keys: Array | None = None
    """One for each element of the first axes of what is dropped from; None: nothing is."""

    @classmethod
    def of(cls, rate: float, key: Array, rows_B: Array) -> "Dropout":
        """Dropout for a batch of sequences that have these numbers."""
        return cls(rate, _folded(key, rows_B) if rate else None)

    def fold(self, number: int | Array) -> "Dropout":
        """Another dropout, with masks of its own for each `number`."""
        return self if self.keys is None else Dropout(self.rate, _folded(self.keys, number))

    def by_head(self, heads_N: Array) -> "Dropout":
        """For what has a second axis, of heads that have these numbers."""
        if self.keys is None:
            return self
        return Dropout(self.rate, jax.vmap(lambda key: _folded(key, heads_N))(self.keys))

    def __call__(self, x: Array) -> Array:
        """Zero each element with probability `rate`, scale the others by 1/(1 − rate)."""
        if self.keys is None:
            return x
        kept = _kept(self.keys, 1 - self.rate, x.shape[self.keys.ndim :])
        return jnp.where(kept, x / (1 - self.rate), 0).astype(x.dtype)


def _folded(keys: Array, numbers: int | Array) -> Array:
    """Keys with numbers folded in; of several of both, each with each of the numbers' own."""
    numbers = jnp.asarray(numbers)
    keys, numbers = jnp.broadcast_arrays(keys, numbers)
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold)
    return fold(keys, numbers)


def _kept(keys: Array, share: float, shape: tuple[int, ...]) -> Array:
    """For each key, of any axes, an array of this shape that is true in about `share` of it."""

    def draw(key: Array) -> Array:
        return jax.random.bernoulli(key, share, shape)

    for _ in range(keys.ndim):
        draw = jax.vmap(draw)
    return draw(keys)


NO_DROPOUT = Dropout(0.0)


class Linear(nnx.Module):
    """y = x · kernel + bias, over named axes: the last axes of x are `inputs`, those of y
    `outputs`. Products are summed in float32, also over devices, and rounded to the type of x.

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
        y = joined(product(x, self.kernel), self.kernel)
        if self.low_rank is not None:
            y = y + self.low_rank(x)
        return save_for_backward((y if self.bias is None else y + self.bias[...]).astype(x.dtype))


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
        inner = joined(product(x, self.down), self.down).astype(x.dtype)
        return product(inner, self.up) * self.scale


class Embedding(nnx.Module):
    """A table with one row of `width` for each index.

    A table of the vocabulary may be split over devices, and have rows at its end that stand for no
    token: each device looks up what it has, and the others' rows are added.
    """

    def __init__(self, rows: Axes, width: Axes, init: Initializer, key: Array) -> None:
        self.embedding = matrix(rows, width, init, key)

    def __call__(self, indices: Array) -> Array:
        """The rows, in float32."""
        table = self.embedding[...]
        if not is_split(self.embedding.axes[0]):
            return rows_of(table, indices).astype(jnp.float32)
        own = indices - collectives.vocabulary_offset(len(table))
        is_here = (own >= 0) & (own < len(table))
        rows = rows_of(table, jnp.where(is_here, own, 0)).astype(jnp.float32)
        return collectives.psum(jnp.where(is_here[..., None], rows, 0), TENSOR)


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
    kernel = matrix[...]
    inputs, outputs = kernel.shape[: matrix.inputs], kernel.shape[matrix.inputs :]
    rows = x.shape[: x.ndim - matrix.inputs]
    kernel_IO = kernel.reshape(math.prod(inputs), -1)
    y_MO = matmul.product(x.reshape(math.prod(rows), -1), kernel_IO)
    return y_MO.reshape(*rows, *outputs)


def joined(y: Array, matrix: nnx.Param) -> Array:
    """The sum of the devices' products with a matrix, where the axes that they sum over are split
    among them."""
    return collectives.psum(y, TENSOR) if sums_over_split(matrix) else y


def sums_over_split(matrix: nnx.Param) -> bool:
    """Whether products with a matrix sum over an axis that devices may share."""
    axes = [axis for axis in matrix.axes if axis != "experts"]
    return any(map(is_split, axes[: matrix.inputs]))


def is_split(axis: str) -> bool:
    """Whether the devices along the tensor axis have each a part of an array axis."""
    return axis in SPLIT_AXES and collectives.axis_size(TENSOR) > 1


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


def initializer(
    config: ModelConfig, mup_power: float = 0, into_residual: bool = False
) -> Initializer:
    """How the config starts a weight matrix.

    Args:
        mup_power: muP divides σ by this power of the width: ½ where inputs and outputs grow with
            it, 1 where only the inputs do (Yang et al. 2022, table 3).
        into_residual: the matrix writes into the residual stream; GPT-2 starts those smaller, so
            that the sum of 2·n_layers of them keeps its size (Radford et al. 2019, section 2.3).
    """
    if config.init == "truncated_normal":
        return glorot_truncated_normal
    scale = 0.02 / math.sqrt(2 * config.n_layers) if into_residual else 0.02
    scale /= config.width_multiplier**mup_power
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

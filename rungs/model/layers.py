"""The parts of a decoder: projections, embeddings, norms, dropout, initializers.

Each parameter is an `nnx.Param` with two pieces of metadata for the optimizer and the mesh: `axes`,
the names of its axes without that of stacked layers, and `inputs`, the number of axes that a matmul
sums over (0 for biases and norms). Axes as in `gpt.py`."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike

from rungs.config.model_config import ModelConfig
from rungs.model.kernels import norms, stored_matrix
from rungs.model.kernels.float8 import Float8Matmul
from rungs.model.kernels.matmul import matmul, rounded_dtype
from rungs.model.remat import save_for_backward
from rungs.parallel import collectives, fsdp, sharding, target_device

SPLIT_AXES = ("heads", "ffn", "vocab")
"""Array axes that are split over the tensor axis of the mesh, if that has several devices."""

Axes = dict[str, int]
Initializer = Callable[[Array, tuple[int, ...], int], Array]
"""From a random key, a shape and the number of input axes to a parameter's initial value."""


class Dropout(NamedTuple):
    """Dropout with one random key per sequence. A mask depends only on the sequence's index within
    the step, the layer and the place in the layer, never on how a batch is split."""

    rate: float
    keys: Array | None = None
    """One per element of the input's leading axes; None for no dropout."""

    @classmethod
    def of(cls, rate: float, key: Array, rows_B: Array) -> "Dropout":
        """Return the dropout for sequences with these indices."""
        return cls(rate, _fold_in(key, rows_B) if rate else None)

    def fold(self, number: int | Array) -> "Dropout":
        """Return a dropout with different masks for each `number`."""
        return self if self.keys is None else Dropout(self.rate, _fold_in(self.keys, number))

    def per_head(self, heads_N: Array) -> "Dropout":
        """Return a dropout for inputs whose second axis is heads with these indices."""
        if self.keys is None:
            return self
        return Dropout(self.rate, jax.vmap(lambda key: _fold_in(key, heads_N))(self.keys))

    def __call__(self, x: Array) -> Array:
        """Zero each element with probability `rate`, scale the others by 1/(1 − rate)."""
        if self.keys is None:
            return x
        return self._drop(x, _bernoulli(self.keys, 1 - self.rate, x.shape[self.keys.ndim :]))

    def of_tokens(self, x_BSD: Array) -> Array:
        """Apply dropout to this device's tokens, with its part of the mask of whole sequences."""
        parts = collectives.axis_size(sharding.CONTEXT)
        if self.keys is None or parts == 1:
            return self(x_BSD)
        _, length, width = x_BSD.shape
        keep_BSD = _bernoulli(self.keys, 1 - self.rate, (parts * length, width))
        first = collectives.axis_index(sharding.CONTEXT) * length
        return self._drop(x_BSD, jax.lax.dynamic_slice_in_dim(keep_BSD, first, length, axis=1))

    def _drop(self, x: Array, keep: Array) -> Array:
        return jnp.where(keep, x / (1 - self.rate), 0).astype(x.dtype)


NO_DROPOUT = Dropout(0.0)


class Linear(nnx.Module):
    """y = x · kernel + bias over named axes: `inputs` are the last axes of x, `outputs` those of y.
    Matmuls accumulate in float32, also over devices; y has the dtype of x.

    Attributes:
        low_rank: the LoRA adapter, if any; see `lora.py`.
        float8: the FP8 matmul; None to multiply in the dtype of x."""

    def __init__(
        self, inputs: Axes, outputs: Axes, init: Initializer, key: Array, bias: bool = True
    ) -> None:
        self.kernel = make_matrix(inputs, outputs, init, key)
        self.bias = make_vector(outputs, 0.0) if bias else None
        self.low_rank: LowRank | None = nnx.data(None)
        self.float8: Float8Matmul | None = nnx.data(None)

    def __call__(self, x: Array) -> Array:
        is_summed_up = self.low_rank is not None or has_split_inputs(self.kernel)
        dtype = jnp.float32 if is_summed_up else rounded_dtype(x.dtype)
        y = psum_if_split(contract(x, self.kernel, dtype, self.float8), self.kernel)
        if self.low_rank is not None:
            y = y + self.low_rank(x)
        leading = x.ndim - self.kernel.inputs
        if self.bias is None:
            return _save_rows(leading, y.astype(x.dtype))
        if y.dtype == x.dtype:  # the matmul wrote this dtype, and a bias is cheap to recompute
            return _add_bias(_save_rows(leading, y), self.bias[...], x.dtype)
        return _save_rows(leading, _add_bias(y, self.bias[...], x.dtype))


def _save_rows(leading: int, y: Array) -> Array:
    """Mark y for the backward pass, with all but the `leading` axes merged, heads side by side, as
    TPUs pad the last axis in memory to 128 elements."""
    return save_for_backward(y.reshape(*y.shape[:leading], -1)).reshape(y.shape)


class LowRankParam(nnx.Param):
    """A parameter of a LoRA adapter; its own type, so that the optimizer can train only these."""


class LowRank(nnx.Module):
    """A LoRA adapter, x · A · B · scale (Hu et al. 2021, section 4.1): `down` is A, from input axes
    to the rank, `up` is B, from the rank to output axes, and `scale` is alpha ÷ rank."""

    def __init__(self, down: LowRankParam, up: LowRankParam, scale: float) -> None:
        self.down, self.up, self.scale = down, up, scale

    def __call__(self, x: Array) -> Array:
        """Return y in float32."""
        inner = psum_if_split(contract(x, self.down), self.down).astype(x.dtype)
        return contract(inner, self.up) * self.scale


class Embedding(nnx.Module):
    """A table with one row of `width` per index.

    A vocabulary table may be split over devices and padded with rows at its end; each device looks
    up its indices, and a psum combines them. With FSDP it is also split by columns, and each device
    looks up its columns for all devices."""

    def __init__(self, rows: Axes, width: Axes, init: Initializer, key: Array) -> None:
        self.embedding = make_matrix(rows, width, init, key)
        self.width = math.prod(width.values())

    def __call__(self, indices: Array) -> Array:
        """Return the rows in float32."""
        if isinstance(table := self.embedding.get_value(), stored_matrix.StoredMatrix):
            return table.rows(indices)
        if not self._has_split_columns:
            return self._rows(indices)
        return fsdp.whole_rows(self._rows(fsdp.of_all_devices(indices)))

    def transposed(self, dtype: jnp.dtype) -> Array | stored_matrix.StoredMatrix:
        """Return the table as a matrix from width to rows; columns that are split are gathered, in
        `dtype` if that is narrower than the table's."""
        table = self.embedding.get_value()
        if isinstance(table, stored_matrix.StoredMatrix):
            return table
        return (fsdp.whole_table(table, dtype) if self._has_split_columns else table).T

    @property
    def _has_split_columns(self) -> bool:
        return fsdp.own_columns(self.embedding.get_value()).shape[-1] < self.width

    def _rows(self, indices: Array) -> Array:
        table = fsdp.own_columns(self.embedding.get_value())
        if not is_split(self.embedding.axes[0]):
            return stored_matrix.take_rows(table, indices).astype(jnp.float32)
        own = indices - collectives.vocabulary_offset(len(table))
        is_here = (own >= 0) & (own < len(table))
        rows = stored_matrix.take_rows(table, jnp.where(is_here, own, 0)).astype(jnp.float32)
        return collectives.psum(jnp.where(is_here[..., None], rows, 0), sharding.TENSOR)


class LayerNorm(nnx.Module):
    """Layer norm with scale and bias, or without parameters; see `kernels/norms.py`."""

    def __init__(self, width: Axes, epsilon: float, parameters: bool = True) -> None:
        self.scale = make_vector(width, 1.0) if parameters else None
        self.bias = make_vector(width, 0.0) if parameters else None
        self.epsilon = epsilon

    def __call__(self, x_BSD: Array) -> Array:
        vectors = [vector[...] for vector in (self.scale, self.bias) if vector is not None]
        return norms.normalize(norms.Norm(self.epsilon, is_centered=True), x_BSD, *vectors)

    def linear(self, x_BSD: Array) -> Array:
        """Return the norm of x with a denominator that counts as a constant, for attributions."""
        y_BSD = _over_constant_size(x_BSD - x_BSD.mean(-1, keepdims=True), self.epsilon)
        if self.scale is None or self.bias is None:
            return y_BSD
        return y_BSD * self.scale[...].astype(jnp.float32) + self.bias[...]


class RMSNorm(nnx.Module):
    """RMS norm over the axes `width`, which may be split over devices, with factor `offset +
    scale`, or without parameters; see `kernels/norms.py`. Gemma's has offset 1, and a scale that
    starts at 0."""

    def __init__(
        self, width: Axes, epsilon: float, offset: float = 0.0, parameters: bool = True
    ) -> None:
        self.scale = make_vector(width, 1.0 - offset) if parameters else None
        self.axes, self.width = len(width), math.prod(width.values())
        self.epsilon, self.offset = epsilon, offset

    def __call__(self, x: Array) -> Array:
        flat = x.reshape(*x.shape[: x.ndim - self.axes], -1)
        if flat.shape[-1] < self.width:
            y = norms.split_rms_norm(flat, self.epsilon, self.width, *self._scales())
        else:
            y = norms.normalize(norms.Norm(self.epsilon, is_centered=False), flat, *self._scales())
        return y.reshape(x.shape)

    def linear(self, x_BSD: Array) -> Array:
        """Return the norm of x with a denominator that counts as a constant, for attributions."""
        y_BSD = _over_constant_size(x_BSD, self.epsilon)
        return y_BSD if self.scale is None else y_BSD * self._scales()[0]

    def _scales(self) -> tuple[Array, ...]:
        if self.scale is None:
            return ()
        scale = self.scale[...].astype(jnp.float32).reshape(-1)
        return (self.offset + scale if self.offset else scale,)


def _over_constant_size(x_BSD: Array, epsilon: float) -> Array:
    """Return x divided by its root mean square, without that one's derivative."""
    mean_square = jnp.square(x_BSD).mean(-1, keepdims=True)
    return x_BSD * jax.lax.stop_gradient(jax.lax.rsqrt(mean_square + epsilon))


Norm = LayerNorm | RMSNorm


def make_norm(config: ModelConfig, width: Axes) -> Norm | None:
    """Return the norm that the config names; None for "none"."""
    if config.norm == "none":
        return None
    if config.norm == "layer_norm":
        return LayerNorm(width, config.norm_epsilon, config.norm_parameters)
    offset = float(config.norm == "rms_norm_plus_one")
    return RMSNorm(width, config.norm_epsilon, offset, config.norm_parameters)


@jax.named_scope("norm")
def apply_norm(norm: Norm | None, x_BSD: Array) -> Array:
    """Return x normalized, or unchanged if there is no norm."""
    return x_BSD if norm is None else norm(x_BSD)


def contract(
    x: Array, matrix: nnx.Param, dtype: DTypeLike = jnp.float32, float8: Float8Matmul | None = None
) -> Array:
    """Return x · matrix, summed over all input axes of the matrix, in `dtype`; in FP8 with
    `float8`. A stored matrix multiplies in float32."""
    kernel = matrix.get_value()
    inputs, outputs = kernel.shape[: matrix.inputs], kernel.shape[matrix.inputs :]
    rows = x.shape[: x.ndim - matrix.inputs]
    if not isinstance(kernel, stored_matrix.StoredMatrix):
        kernel = kernel.reshape(math.prod(inputs), -1)
    y_MO = (float8 or matmul)(x.reshape(math.prod(rows), -1), kernel, dtype)
    return y_MO.reshape(*rows, *outputs)


def _add_bias(y: Array, bias: Array, dtype: DTypeLike) -> Array:
    """Return y + bias in `dtype`. Without the barrier XLA would sum the bias's gradient in the
    kernel that computes y's, and write both in float32."""
    return target_device.gpu_gradient_barrier((y + bias).astype(dtype))


def psum_if_split(y: Array, matrix: nnx.Param) -> Array:
    """Return the sum of y over devices, if y is a partial sum over split input axes of a matrix."""
    return collectives.psum(y, sharding.TENSOR) if has_split_inputs(matrix) else y


def has_split_inputs(matrix: nnx.Param) -> bool:
    """Return whether an input axis of a matrix is split over devices."""
    axes = [axis for axis in matrix.axes if axis != "experts"]
    return any(map(is_split, axes[: matrix.inputs]))


def is_split(axis: str) -> bool:
    """Return whether an array axis is split over the tensor axis of the mesh."""
    return axis in SPLIT_AXES and collectives.axis_size(sharding.TENSOR) > 1


def make_matrix(inputs: Axes, outputs: Axes, init: Initializer, key: Array) -> nnx.Param:
    """Return a float32 parameter for matmuls that sum over its `inputs` axes."""
    shape = (*inputs.values(), *outputs.values())
    return nnx.Param(init(key, shape, len(inputs)), axes=(*inputs, *outputs), inputs=len(inputs))


def make_vector(axes: Axes, value: float) -> nnx.Param:
    """Return a float32 parameter for elementwise use, filled with `value`."""
    values = jnp.full(tuple(axes.values()), value, jnp.float32)
    return nnx.Param(values, axes=tuple(axes), inputs=0)


def layers_with(param: nnx.Variable, n_layers: int) -> Sequence[int]:
    """Return the layers that have a parameter stacked over them, in order: all, unless it says."""
    own: Sequence[int] = param.get_metadata().get("layers", range(n_layers))
    return own


def initializer(
    config: ModelConfig, mup_power: float = 0, into_residual: bool = False
) -> Initializer:
    """Return the config's initializer of a weight matrix.

    Args:
        mup_power: muP divides σ by the width to this power: ½ if inputs and outputs grow with the
            width, 1 if only the inputs do (Yang et al. 2022, table 3).
        into_residual: the matrix writes into the residual stream. GPT-2 scales these down, so that
            the sum of 2·n_layers of them keeps its size (Radford et al. 2019, section 2.3)."""
    if into_residual and config.zero_init_residual:
        return zeros
    if config.init == "truncated_normal":
        return glorot_truncated_normal
    scale = 0.02 / math.sqrt(2 * config.n_layers) if into_residual else 0.02
    scale /= config.width_multiplier**mup_power
    return functools.partial(scaled_normal, scale=scale)


def zeros(_: Array, shape: tuple[int, ...], __: int) -> Array:
    """Return zeros."""
    return jnp.zeros(shape, jnp.float32)


def scaled_normal(key: Array, shape: tuple[int, ...], inputs: int, *, scale: float) -> Array:
    """Return normal samples with σ = `scale`, regardless of the shape."""
    del inputs
    return scale * jax.random.normal(key, shape)


def glorot_truncated_normal(key: Array, shape: tuple[int, ...], inputs: int) -> Array:
    """Return normal samples with σ² = 2/(in + out), cut at ±3σ (after Glorot & Bengio 2010)."""
    fan_in, fan_out = math.prod(shape[:inputs]), math.prod(shape[inputs:])
    sigma = math.sqrt(2 / (fan_in + fan_out))
    return sigma * jax.random.truncated_normal(key, -3, 3, shape)


def _fold_in(keys: Array, numbers: int | Array) -> Array:
    """Return random keys with numbers folded in elementwise, with broadcasting."""
    keys, numbers = jnp.broadcast_arrays(keys, jnp.asarray(numbers))
    return _vmapped(jax.random.fold_in, keys.ndim)(keys, numbers)


def _bernoulli(keys: Array, probability: float, shape: tuple[int, ...]) -> Array:
    """Return, for each key, an array of this shape of Bernoulli samples."""
    draw = functools.partial(jax.random.bernoulli, p=probability, shape=shape)
    return _vmapped(draw, keys.ndim)(keys)


def _vmapped(function: Callable[..., Array], axes: int) -> Callable[..., Array]:
    """Return the function mapped over this many leading axes."""
    return functools.reduce(lambda mapped, _: jax.vmap(mapped), range(axes), function)

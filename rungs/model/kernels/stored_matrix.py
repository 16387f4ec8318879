"""Matrices in the forms in which generation multiplies them; there is no derivative.

XLA multiplies a few rows with a matrix fastest if the sum is over the matrix's last axis in memory.
Otherwise its GPU compiler writes a transposed copy of each 16-bit matrix for every single-row
token, and its CPU compiler a float32 copy of the whole matrix; the latter also for a single row,
and of a whole table to look up 16-bit rows, so these are moved as integers. Its CPU library packs
the right operand of each matmul anew, so a float32 matrix is the left one for a few rows.

Axes as in `matmul.py`."""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from rungs.parallel import target_device

LARGEST = 127
"""The largest integer; −128 is not used, to keep the range symmetric."""
_FEW_ROWS = 32
"""Up to here packing a float32 matrix takes longer on a CPU than multiplying it."""
_PARTS = 2 * LARGEST
"""Steps of an activation's second, finer part in one step of its first."""


class StoredMatrix(abc.ABC):
    """A matrix that is not stored as one array of its parameter's shape."""

    shape: tuple[int, ...]
    """The parameter's shape."""

    @abc.abstractmethod
    def multiply(self, x_MI: Array) -> Array:
        """Return x · matrix: y_MO, in float32."""

    @abc.abstractmethod
    def rows(self, indices: Array) -> Array:
        """Return some outputs' vectors, float32: rows of a table that is also the output head."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputMajorMatrix(StoredMatrix):
    """A matrix of floats with one row per output."""

    values_OI: Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def multiply(self, x_MI: Array) -> Array:
        """Return x · matrix. On a CPU a single row of 16-bit floats is computed twice."""
        rows, on_cpu = len(x_MI), target_device.platform() == "cpu"
        x_MI = x_MI.astype(self.values_OI.dtype)
        if on_cpu and x_MI.dtype.itemsize == 2:
            x_MI = jnp.concatenate([x_MI, x_MI]) if rows == 1 else x_MI
        elif on_cpu and 1 < rows <= _FEW_ROWS:
            y_OM = dot(self.values_OI, x_MI, 1, 1)
            return jax.lax.optimization_barrier(y_OM).T  # else XLA exchanges the operands
        return dot(x_MI, self.values_OI, 1, 1)[:rows]

    def rows(self, indices: Array) -> Array:
        """Return rows in float32."""
        return take_rows(self.values_OI, indices).astype(jnp.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Matrix(StoredMatrix):
    """A matrix of 8-bit integers, with a float32 scale for each output (symmetric absmax
    quantization; Dettmers et al. 2022, "LLM.int8()", section 2).

    A CPU multiplies 8-bit integers several times as fast as floats, and reads fewer bytes. There,
    activations become 16-bit integers split into two rows of one matmul, with a rounding error of
    at most 2⁻¹⁶ of a row's largest element, much less than the weights'. Elsewhere the weights are
    converted to the activations' dtype as they are read."""

    integers_OI: Array
    """int8."""
    scales_O: Array
    """float32."""
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def multiply(self, x_MI: Array) -> Array:
        """Return x · matrix: y_MO, in float32."""
        if target_device.platform() == "cpu":
            return _multiply_integers(x_MI.astype(jnp.float32), self.integers_OI) * self.scales_O
        products = dot(x_MI, self.integers_OI.astype(x_MI.dtype), 1, 1)
        return products * self.scales_O

    def rows(self, indices: Array) -> Array:
        """Return rows in float32."""
        return self.integers_OI[indices].astype(jnp.float32) * self.scales_O[indices][..., None]


def quantize(matrix_OI: Array, shape: tuple[int, ...]) -> Int8Matrix:
    """Round a matrix to 8 bits; `shape` is that of its parameter."""
    integers_OI, scales_O1 = _as_integers(matrix_OI.astype(jnp.float32))
    return Int8Matrix(integers_OI.astype(jnp.int8), scales_O1[:, 0], shape)


def _as_integers(x_MI: Array) -> tuple[Array, Array]:
    """Return integers, as floats, and their scale per row, 1 for a row of zeros."""
    largest_M1 = jnp.abs(x_MI).max(axis=1, keepdims=True)
    scales_M1 = jnp.where(largest_M1 == 0, 1.0, largest_M1 / LARGEST)
    return jnp.round(x_MI / scales_M1), scales_M1


def _multiply_integers(x_MI: Array, integers_OI: Array) -> Array:
    high_MI, scales_M1 = _as_integers(x_MI)
    low_MI = jnp.round((x_MI / scales_M1 - high_MI) * _PARTS)
    parts = jnp.concatenate([high_MI, low_MI]).astype(jnp.int8)
    high_MO, low_MO = jnp.split(dot(parts, integers_OI, 1, 1, jnp.int32), 2)
    return (high_MO + low_MO / _PARTS) * scales_M1


def outputs_first(kernel: Array, inputs: int) -> Array:
    """Return a parameter as matrix_OI, for matmuls that sum over its first `inputs` axes."""
    return kernel.reshape(math.prod(kernel.shape[:inputs]), -1).T


def dot(
    left: Array,
    right: Array,
    left_axis: int,
    right_axis: int,
    dtype: DTypeLike = jnp.float32,
    precision: jax.lax.Precision | None = None,
) -> Array:
    """Return the products of two matrices summed over an axis of each, in `dtype`."""
    contracted = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(
        left, right, contracted, precision=precision, preferred_element_type=dtype
    )


def take_rows(table: Array, indices: Array) -> Array:
    """Return rows of a table, moving bfloat16 rows as integers."""
    if table.dtype != jnp.bfloat16:
        return table[indices]
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)[indices]
    return jax.lax.bitcast_convert_type(bits, table.dtype)

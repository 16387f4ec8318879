"""Matmul with weights of 8 bits: integers, and a float32 scale for each output (symmetric absmax
quantization; Dettmers et al. 2022, "LLM.int8()", section 2).

A CPU multiplies 8-bit integers several times as fast as floats, and reads fewer bytes. So there,
activations become integers of 16 bits in two parts, which are two rows of one matmul: relative to
a row's largest element, a rounding error of 2⁻¹⁶ at most, much less than that of the weights.
Elsewhere the weights are converted to the dtype of the activations as they are read.

Axes as in `matmul.py`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

from rungs.model.kernels.stored_matrix import StoredMatrix, dot
from rungs.parallel import target_device

LARGEST = 127
"""The largest integer; −128 is not used, so that the range is symmetric."""
_PARTS = 2 * LARGEST
"""Steps of an activation's second part, the finer one, in one step of its first."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Matrix(StoredMatrix):
    """A quantized matrix: `integers` · `scales`."""

    integers_OI: Array
    """int8."""
    scales_O: Array
    """float32."""
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def multiply(self, x_MI: Array) -> Array:
        """Return x · matrix: y_MO, in float32."""
        if target_device.platform() == "cpu":
            return _multiply_integers(x_MI.astype(jnp.float32), self.integers_OI) * self.scales_O
        products = dot(x_MI, self.integers_OI.astype(x_MI.dtype), jnp.float32)
        return products * self.scales_O

    def rows(self, indices: Array) -> Array:
        """Return rows in float32."""
        return self.integers_OI[indices].astype(jnp.float32) * self.scales_O[indices][..., None]


def quantize(matrix_OI: Array, shape: tuple[int, ...]) -> Int8Matrix:
    """Round a matrix.

    Args:
        shape: that of its parameter.
    """
    integers_OI, scales_O1 = _as_integers(matrix_OI.astype(jnp.float32))
    return Int8Matrix(integers_OI.astype(jnp.int8), scales_O1[:, 0], shape)


def _as_integers(x_MI: Array) -> tuple[Array, Array]:
    """Return integers, as floats, and their scale, one for each row. A row of zeros has scale 1."""
    largest_M1 = jnp.abs(x_MI).max(axis=1, keepdims=True)
    scales_M1 = jnp.where(largest_M1 == 0, 1.0, largest_M1 / LARGEST)
    return jnp.round(x_MI / scales_M1), scales_M1


def _multiply_integers(x_MI: Array, integers_OI: Array) -> Array:
    high_MI, scales_M1 = _as_integers(x_MI)
    low_MI = jnp.round((x_MI / scales_M1 - high_MI) * _PARTS)
    parts = jnp.concatenate([high_MI, low_MI]).astype(jnp.int8)
    high_MO, low_MO = jnp.split(dot(parts, integers_OI, jnp.int32), 2)
    return (high_MO + low_MO / _PARTS) * scales_M1

"""Matrices in the forms in which generation multiplies them; there is no derivative.

XLA's CPU compiler multiplies a few rows with a 16-bit matrix fastest if the sum is over the
matrix's last axis, as it lies in memory. If that is only what a transposition says, it first makes
a float32 copy of the whole matrix, and also if there is a single row. It makes one of a whole table
to look up 16-bit rows, too, so these are moved as integers.

Axes as in `matmul.py`.
"""

import abc
import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array


class StoredMatrix(abc.ABC):
    """A matrix that is not one array of its parameter's shape."""

    shape: tuple[int, ...]
    """That of the parameter."""

    @abc.abstractmethod
    def multiply(self, x_MI: Array) -> Array:
        """Return x · matrix: y_MO, in float32."""

    @abc.abstractmethod
    def rows(self, indices: Array) -> Array:
        """Return outputs' vectors, in float32: rows of an embedding table that is the output head,
        too."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OutputMajorMatrix(StoredMatrix):
    """A matrix of 16-bit floats with a row for each output."""

    values_OI: Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def multiply(self, x_MI: Array) -> Array:
        """Return x · matrix. A single row is computed twice."""
        rows = len(x_MI)
        x_MI = jnp.concatenate([x_MI, x_MI]) if rows == 1 else x_MI
        return dot(x_MI.astype(self.values_OI.dtype), self.values_OI, jnp.float32)[:rows]

    def rows(self, indices: Array) -> Array:
        """Return rows in float32."""
        return take_rows(self.values_OI, indices).astype(jnp.float32)


def outputs_first(kernel: Array, inputs: int) -> Array:
    """Return matrix_OI of a parameter for matmuls that sum over its first `inputs` axes."""
    return kernel.reshape(math.prod(kernel.shape[:inputs]), -1).T


def dot(left_MI: Array, right_OI: Array, dtype: jnp.dtype) -> Array:
    """Return left · rightᵀ, with the sum in `dtype`."""
    return jax.lax.dot_general(
        left_MI, right_OI, (((1,), (1,)), ((), ())), preferred_element_type=dtype
    )


def take_rows(table: Array, indices: Array) -> Array:
    """Return rows of a table, those of bfloat16 moved as integers."""
    if table.dtype != jnp.bfloat16:
        return table[indices]
    bits = jax.lax.bitcast_convert_type(table, jnp.uint16)[indices]
    return jax.lax.bitcast_convert_type(bits, table.dtype)

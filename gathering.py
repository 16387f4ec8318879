"""Weights of which each device along the data axis keeps a part, made whole where they are needed.

A layer's weights are gathered when its turn comes, and again in the backward pass, so that no more
than a layer's are whole at a time. The gradient goes back to each device as the sum of its part.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from model import GPT, as_they_are
from shard import DATA
from sharding import Layout

BLOCKS = "blocks"
Path = tuple[Any, ...]


class Gathering:
    """How the parts of a model's weights are put together.

    Args:
        layout: of the model.
        model: its arrays whole, or in the abstract.
        compute_dtype: matrices of layers are gathered in this type; half the bytes in bfloat16.
    """

    def __init__(self, layout: Layout, model: GPT, compute_dtype: jnp.dtype) -> None:
        self._compute_dtype = compute_dtype
        specs = nnx.to_flat_state(layout.specs(nnx.state(model)))
        self._split_axes = {path: spec.index(DATA) for path, spec in specs if DATA in spec}
        self.of_layer = self._of_layer if self._split_axes else as_they_are
        """Makes whole the weights of one layer, a state of its block."""

    def outside_blocks(self, model: GPT) -> None:
        """Make whole, in place, all that is not in a block."""
        state = nnx.state(model)
        for path, variable in nnx.to_flat_state(state):
            if path[0] != BLOCKS and path in self._split_axes:
                array = variable.get_value()
                variable.set_value(gathered(array, self._split_axes[path], array.dtype))
        nnx.update(model, state)

    def _of_layer(self, weights: nnx.State) -> nnx.State:
        whole = []
        for path, variable in nnx.to_flat_state(weights):
            axis = self._split_axes.get((BLOCKS, *path))
            if axis is not None:
                array = variable.get_value()
                dtype = self._compute_dtype if variable.inputs else array.dtype
                variable = variable.replace(gathered(array, axis - 1, dtype))
            whole.append((path, variable))
        return nnx.from_flat_state(whole)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(part: Array, axis: int, dtype: jnp.dtype) -> Array:
    """All devices' parts of an array in one, in a type in which they travel; gradients of it are
    summed in float32."""
    return jax.lax.all_gather(part.astype(dtype), DATA, axis=axis, tiled=True)


def _forward(part: Array, axis: int, dtype: jnp.dtype) -> tuple[Array, None]:
    return gathered(part, axis, dtype), None


def _backward(axis: int, _dtype: jnp.dtype, _: None, gradient: Array) -> tuple[Array]:
    gradient = gradient.astype(jnp.float32)
    return (jax.lax.psum_scatter(gradient, DATA, scatter_dimension=axis, tiled=True),)


gathered.defvjp(_forward, _backward)

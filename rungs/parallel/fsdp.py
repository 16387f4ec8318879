"""Weights of which each device along the data axis keeps a part, made whole where they are needed.

A layer's weights are gathered when its turn comes, and again in the backward pass, so that no more
than a layer's are whole at a time; embedding and head are whole throughout a microbatch. The
gradient goes back to each device as the sum of its part.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from rungs.parallel.axes import BLOCKS, DATA, HEAD
from rungs.parallel.mesh import Layout


def unsharded(weights: nnx.State) -> nnx.State:
    """Return the weights of a layer as they are: every device holds them whole."""
    return weights


class Gathering:
    """How the parts of a model's weights are put together.

    Args:
        layout: of the model.
        model: its arrays whole, or in the abstract.
        compute_dtype: matrices of layers and the head are gathered in this type, unless they are
            narrower; half the bytes in bfloat16.
    """

    def __init__(self, layout: Layout, model: nnx.Module, compute_dtype: jnp.dtype) -> None:
        self._compute_dtype = compute_dtype
        specs = nnx.to_flat_state(layout.specs(nnx.state(model)))
        self._split_axes = {path: spec.index(DATA) for path, spec in specs if DATA in spec}
        self.of_layer = self._of_layer if self._split_axes else unsharded
        """Makes whole the weights of one layer, a state of its block."""

    def outside_blocks(self, model: nnx.Module) -> None:
        """Make whole, in place, all that is not in a block."""
        state = nnx.state(model)
        for path, variable in nnx.to_flat_state(state):
            if path[0] != BLOCKS and path in self._split_axes:
                dtype = self._travels_as(variable) if path[0] == HEAD else None
                variable.set_value(gathered(variable.get_value(), self._split_axes[path], dtype))
        nnx.update(model, state)

    def _of_layer(self, weights: nnx.State) -> nnx.State:
        whole = []
        for path, variable in nnx.to_flat_state(weights):
            axis = self._split_axes.get((BLOCKS, *path))
            if axis is not None:
                dtype = self._travels_as(variable)
                variable = variable.replace(gathered(variable.get_value(), axis - 1, dtype))
            whole.append((path, variable))
        return nnx.from_flat_state(whole)

    def _travels_as(self, variable: nnx.Variable) -> jnp.dtype | None:
        """The type of a weight on its way, None for its own."""
        has = variable.get_value().dtype
        narrower = self._compute_dtype.itemsize < has.itemsize
        return self._compute_dtype if variable.inputs and narrower else None


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gathered(part: Array, axis: int, dtype: jnp.dtype | None) -> Array:
    """All devices' parts of an array in one; gradients of it are summed in float32.

    Args:
        part: of any shape.
        axis: along which the parts follow one another.
        dtype: in which they travel, and stay; None for their own.
    """
    return jax.lax.all_gather(part.astype(dtype or part.dtype), DATA, axis=axis, tiled=True)


def _forward(part: Array, axis: int, dtype: jnp.dtype | None) -> tuple[Array, None]:
    return gathered(part, axis, dtype), None


def _backward(axis: int, _dtype: jnp.dtype | None, _: None, gradient: Array) -> tuple[Array]:
    gradient = gradient.astype(jnp.float32)
    return (jax.lax.psum_scatter(gradient, DATA, scatter_dimension=axis, tiled=True),)


gathered.defvjp(_forward, _backward)

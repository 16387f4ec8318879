"""What is given: residual layers, a loss, an optimizer and a mesh, on dictionaries of arrays.

B rows of a batch, D width, F hidden units, L layers. The weights of a layer are "up" (D, F) and
"down" (F, D); those of a stack of layers have an axis L in front."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh

DATA = "data"
"""The axis of the mesh, along which devices have different rows of a batch."""
LEARNING_RATE, MOMENTUM = 0.05, 0.9

Params = dict[str, jax.Array]


class Batch(NamedTuple):
    """Rows to learn from. Those that don't count only fill up the batch, as padding does."""

    inputs_BD: jax.Array
    targets_BD: jax.Array
    counted_B: jax.Array
    """1 or 0."""


def data_mesh(devices: int) -> Mesh:
    """Return a mesh of the first devices, all along DATA."""
    return jax.make_mesh((devices,), (DATA,), axis_types=(AxisType.Auto,))


def layer(weights: Params, x_BD: jax.Array) -> jax.Array:
    """Return x after one residual layer."""
    return x_BD + jnp.tanh(x_BD @ weights["up"]) @ weights["down"]


def summed_error(outputs_BD: jax.Array, batch: Batch) -> jax.Array:
    """Return half the squared error, summed over the rows that count."""
    errors_B = jnp.square(outputs_BD - batch.targets_BD).sum(-1) / 2
    return jnp.sum(errors_B * batch.counted_B)


def summed_loss(params: Params, batch: Batch) -> jax.Array:
    """Return the loss of a model with one layer, summed over the rows that count."""
    return summed_error(layer(params, batch.inputs_BD), batch)


def sgd(params: Params, moments: Params, gradients: Params) -> tuple[Params, Params]:
    """Return new weights and moments: SGD with momentum. Each number needs only its own gradient,
    so any part of the arrays can be updated alone."""
    moments = jax.tree.map(lambda m, g: MOMENTUM * m + g, moments, gradients)
    return jax.tree.map(lambda w, m: w - LEARNING_RATE * m, params, moments), moments

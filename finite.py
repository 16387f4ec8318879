"""Which arrays hold a number that is none: NaN or infinity."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from state import dotted, named_arrays

NONE = np.int32(np.iinfo(np.int32).max)
"""In place of an array's number, where all arrays are finite."""
NORM = "the norm of the gradients' sum"
"""It can be infinite where all gradients are finite."""


def first_not_finite(tree: Any) -> Array:
    """The number of the first array in a tree that is not finite, among the tree's leaves; `NONE`
    where all are."""
    largest = [jnp.max(jnp.abs(leaf), initial=0) for leaf in jax.tree.leaves(tree)]
    finite = jnp.isfinite(jnp.stack(largest))  # the largest of numbers with a NaN is NaN
    return jnp.where(finite.all(), NONE, finite.argmin().astype(jnp.int32))


def suspects(model: nnx.Module, wrt: Any) -> list[str]:
    """What a step looks at in each microbatch, by number: the loss, then the gradient of each
    trained parameter.

    Args:
        wrt: the kind of parameters that are trained.
    """
    names = [dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model, wrt))]
    return ["the loss", *(f"the gradient of {name}" for name in names)]


def first_named(bad: dict[int, str]) -> str:
    """Of what was not finite in each microbatch, the first, with its microbatch; the norm is that
    of all microbatches."""
    number, what = next(iter(bad.items()))
    return what if what == NORM else f"{what} of microbatch {number}"


def not_finite(*modules: nnx.Module | nnx.Optimizer) -> list[str]:
    """The arrays of models and optimizers that are not finite, by dotted name."""
    arrays = {k: v for module in modules for k, v in named_arrays(module).items()}
    numbers = {k: v for k, v in arrays.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
    return [name for name, finite in jax.device_get(_finite(numbers)).items() if not finite]


@jax.jit
def _finite(arrays: dict[str, Array]) -> dict[str, Array]:
    return {name: jnp.isfinite(array).all() for name, array in arrays.items()}

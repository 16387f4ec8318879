"""Which arrays hold a number that is none: NaN or infinity."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.parallel.axes import dotted

NONE = np.int32(np.iinfo(np.int32).max)
"""In place of an array's number, where all arrays are finite."""
NORM = "the norm of the gradients' sum"
"""It can be infinite where all gradients are finite."""

Flags = dict[str, Array]
"""For each array whether it is finite, by name."""


def first_not_finite(tree: Any) -> Array:
    """The number of the first array in a tree that is not finite, among the tree's leaves; `NONE`
    where all are."""
    finite = jnp.stack([_is_finite(leaf) for leaf in jax.tree.leaves(tree)])
    return jnp.where(finite.all(), NONE, finite.argmin().astype(jnp.int32))


def _is_finite(array: Array) -> Array:
    """Whether all its numbers are: the largest of numbers with a NaN is NaN."""
    return jnp.isfinite(jnp.max(jnp.abs(array), initial=0))


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


def flags_of(arrays: Mapping[str, Array]) -> Flags:
    """Begin to find out which arrays are finite."""
    numbers = {k: v for k, v in arrays.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
    return _are_finite(numbers)


@jax.jit
def _are_finite(arrays: dict[str, Array]) -> Flags:
    return {name: _is_finite(array) for name, array in arrays.items()}


def not_finite(flags: Flags) -> list[str]:
    """The names of those that are not."""
    return [name for name, is_finite in jax.device_get(flags).items() if not is_finite]

"""Find arrays with NaN or infinity, and name them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.parallel.mesh import dotted

ALL_FINITE = np.int32(np.iinfo(np.int32).max)
"""What `first_nonfinite` returns if all arrays are finite."""
GRADIENT_NORM = "the gradient norm"
"""It can be infinite although all gradients are finite."""

Flags = dict[str, Array]
"""For each array, by name, whether it is finite."""


def first_nonfinite(tree: Any) -> Array:
    """Return the index, among the tree's leaves, of the first array that is not finite;
    `ALL_FINITE` if all are."""
    finite = jnp.stack([_is_finite(leaf) for leaf in jax.tree.leaves(tree)])
    return jnp.where(finite.all(), ALL_FINITE, finite.argmin().astype(jnp.int32))


def _is_finite(array: Array) -> Array:
    """Return whether all elements are finite; the maximum of numbers with a NaN is NaN."""
    return jnp.isfinite(jnp.max(jnp.abs(array), initial=0))


def checked_names(model: nnx.Module, wrt: Any) -> list[str]:
    """Return the names of the arrays that a step checks in each microbatch, by index: the loss,
    then the gradient of each trained parameter.

    Args:
        wrt: the kind of variables that are trained.
    """
    names = [dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model, wrt))]
    return ["the loss", *(f"the gradient of {name}" for name in names)]


def describe_first(nonfinite: dict[int, str]) -> str:
    """Return the first non-finite array with its microbatch; the norm belongs to all of them.

    Args:
        nonfinite: by microbatch, as from `StepResult.nonfinite`.
    """
    microbatch, name = next(iter(nonfinite.items()))
    return name if name == GRADIENT_NORM else f"{name} of microbatch {microbatch}"


def finite_flags(arrays: Mapping[str, Array]) -> Flags:
    """Start to compute which arrays are finite; read the result with `nonfinite_names`."""
    numbers = {k: v for k, v in arrays.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
    return _are_finite(numbers)


@jax.jit
def _are_finite(arrays: dict[str, Array]) -> Flags:
    return {name: _is_finite(array) for name, array in arrays.items()}


def nonfinite_names(flags: Flags) -> list[str]:
    """Return the names of the arrays that are not finite."""
    return [name for name, is_finite in jax.device_get(flags).items() if not is_finite]

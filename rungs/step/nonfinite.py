"""Find arrays with NaN or infinity, and name them. What follows from them is in
docs/architecture.md, "What happens to a failed step"."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from rungs.parallel.sharding import dotted

ALL_FINITE = np.int32(np.iinfo(np.int32).max)
"""Result of `first_nonfinite` if all arrays are finite."""
GRADIENT_NORM = "the gradient norm"
"""It can be infinite although all gradients are finite, as a sum of squares."""

Flags = dict[str, Array]
"""Whether each array is finite, by name."""


def first_nonfinite(tree: Any) -> Array:
    """Return the index of the tree's first non-finite leaf; `ALL_FINITE` if there is none."""
    finite = jnp.stack([_is_finite(leaf) for leaf in jax.tree.leaves(tree)])
    return jnp.where(finite.all(), ALL_FINITE, finite.argmin().astype(jnp.int32))


def _is_finite(array: Array) -> Array:
    """Return whether all elements are finite. A maximum over a NaN is NaN."""
    return jnp.isfinite(jnp.max(jnp.abs(array), initial=0))


def checked_names(model: nnx.Module, wrt: Any) -> list[str]:
    """Return the names of the arrays that a step checks in each microbatch, by index: the loss,
    then the gradient of each parameter of kind `wrt`."""
    names = [dotted(path) for path, _ in nnx.to_flat_state(nnx.state(model, wrt))]
    return ["the loss", *(f"the gradient of {name}" for name in names)]


def describe_first(nonfinite: dict[int, str]) -> str:
    """Describe the first non-finite array and its microbatch, if it is of one. `nonfinite` is by
    microbatch, as from `StepResult.nonfinite`."""
    microbatch, name = next(iter(nonfinite.items()))
    return name if name == GRADIENT_NORM else f"{name} of microbatch {microbatch}"


def finite_flags(arrays: Mapping[str, Array]) -> Flags:
    """Start computing which arrays are finite; read the result with `nonfinite_names`."""
    numbers = {k: v for k, v in arrays.items() if jnp.issubdtype(v.dtype, jnp.inexact)}
    return _are_finite(numbers)


@jax.jit
def _are_finite(arrays: dict[str, Array]) -> Flags:
    return {name: _is_finite(array) for name, array in arrays.items()}


def nonfinite_names(flags: Flags) -> list[str]:
    """Return the names of the non-finite arrays."""
    return [name for name, is_finite in jax.device_get(flags).items() if not is_finite]

"""Barriers that keep XLA from fusing, where that costs time or memory. Each acts on one platform
and does nothing on others."""

from typing import TypeVar

import jax
from jax import Array

from rungs.parallel import target_device

Tree = TypeVar("Tree")


def cpu_barrier(tree: Tree) -> Tree:
    """Return arrays that, on a CPU, are computed once and lie in memory, not fused with what reads
    them."""
    on_cpu = target_device.platform() == "cpu"
    barred: Tree = jax.lax.optimization_barrier(tree) if on_cpu else tree
    return barred


def gpu_gradient_barrier(x: Array) -> Array:
    """Return x, whose gradient, on a GPU, is computed once and lies in memory in the dtype of x."""
    return _with_barred_gradient(x) if target_device.platform() == "gpu" else x


@jax.custom_vjp
def _with_barred_gradient(x: Array) -> Array:
    return x


_with_barred_gradient.defvjp(
    lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),)
)

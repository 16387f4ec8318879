"""A barrier to the optimizations of XLA's CPU compiler, where they cost time or memory."""

from typing import TypeVar

import jax

from rungs.parallel import target_device

Tree = TypeVar("Tree")


def cpu_barrier(tree: Tree) -> Tree:
    """Return arrays that, on a CPU, are computed once and lie in memory: what reads them is not
    fused with what computes them. Elsewhere this does nothing."""
    on_cpu = target_device.platform() == "cpu"
    barred: Tree = jax.lax.optimization_barrier(tree) if on_cpu else tree
    return barred

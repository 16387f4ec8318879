"""The kind of device that programs are traced for, the local one or, in a plan, another one;
barriers that keep XLA from fusing where that costs time or memory, each on one platform."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import jax
from jax import Array


class Target(NamedTuple):
    """A kind of device."""

    platform: str
    """cpu, gpu or tpu, as in `jax.Device.platform`."""
    compute_capability: str = ""
    """Compute capability of an NVIDIA GPU."""


_planned: ContextVar[tuple[Target, bool] | None] = ContextVar("target", default=None)
"""Another kind of device than the local one, and whether programs are compiled for it."""


def target() -> Target:
    """Return the kind of device that programs are traced for."""
    planned = _planned.get()
    return planned[0] if planned else _local_device()


def platform() -> str:
    """Return the platform of the target: cpu, gpu or tpu."""
    return target().platform


def is_compiled() -> bool:
    """Return whether programs are compiled for the target, so that they may have kernels that only
    its own compiler knows. In an estimate they are only traced."""
    planned = _planned.get()
    return planned is None or planned[1] or planned[0] == _local_device()


def is_ampere_or_later() -> bool:
    """Return whether the target is an NVIDIA GPU of compute capability 8.0 or more."""
    generation = target().compute_capability.split(".")[0]
    return generation.isdigit() and int(generation) >= 8


@contextlib.contextmanager
def trace_for(target: Target | None, is_compiled: bool = False) -> Iterator[None]:
    """Trace programs for another kind of device. None means the local one. `is_compiled` says
    whether its compiler is here and compiles them."""
    token = _planned.set(target and (target, is_compiled))
    try:
        yield
    finally:
        _planned.reset(token)


def _local_device() -> Target:
    device = jax.devices()[0]
    return Target(device.platform, str(getattr(device, "compute_capability", "")))


Tree = TypeVar("Tree")


def cpu_barrier(tree: Tree) -> Tree:
    """Return arrays that, on a CPU, are computed once and lie in memory, not fused with what reads
    them."""
    on_cpu = platform() == "cpu"
    return jax.lax.optimization_barrier(tree) if on_cpu else tree


def gpu_gradient_barrier(x: Array) -> Array:
    """Return x, whose gradient, on a GPU, is computed once and lies in memory in the dtype of x."""
    return _with_barred_gradient(x) if platform() == "gpu" else x


@jax.custom_vjp
def _with_barred_gradient(x: Array) -> Array:
    return x


_with_barred_gradient.defvjp(
    lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),)
)

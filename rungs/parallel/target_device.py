"""The kind of device that programs are traced for: the local one or, in a plan, another one.
Barriers that keep XLA from fusing where that costs time or memory, each on one platform."""

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
"""The planned kind of device, and whether programs are compiled for it; None for the local one."""


def target() -> Target:
    """Return the kind of device that programs are traced for."""
    planned = _planned.get()
    return planned[0] if planned else _local_device()


def platform() -> str:
    """Return the platform of the target: cpu, gpu or tpu."""
    return target().platform


def is_compiled() -> bool:
    """Return whether programs are compiled for the target, and so may use kernels that only its
    compiler knows. In an estimate they are only traced."""
    planned = _planned.get()
    return planned is None or planned[1] or planned[0] == _local_device()


def is_ampere_or_later() -> bool:
    """Return whether the target is an NVIDIA GPU of compute capability 8.0 or more."""
    generation = target().compute_capability.split(".")[0]
    return generation.isdigit() and int(generation) >= 8


@contextlib.contextmanager
def trace_for(target: Target | None, is_compiled: bool = False) -> Iterator[None]:
    """Trace programs for another kind of device, or the local one if None. `is_compiled`: its
    compiler is installed and compiles them."""
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
    """Return arrays that a CPU computes once and stores, without fusing them into their users."""
    on_cpu = platform() == "cpu"
    barred: Tree = jax.lax.optimization_barrier(tree) if on_cpu else tree
    return barred


def gpu_gradient_barrier(x: Array) -> Array:
    """Return x, whose gradient a GPU computes once and stores in the dtype of x."""
    return _with_barred_gradient(x) if platform() == "gpu" else x


@jax.custom_vjp
def _with_barred_gradient(x: Array) -> Array:
    return x


_with_barred_gradient.defvjp(
    lambda x: (x, None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),)
)

"""The kind of device that programs are traced for: the local one or, in a plan, another one."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """A kind of device."""

    platform: str
    """cpu, gpu or tpu, as in `jax.Device.platform`."""
    compute_capability: str = ""
    """Only of NVIDIA GPUs."""


_override: ContextVar[Target | None] = ContextVar("target", default=None)


def target() -> Target:
    """Return the kind of device that programs are traced for."""
    return _override.get() or _local_device()


def platform() -> str:
    """Return the platform of the target: cpu, gpu or tpu."""
    return target().platform


def is_local() -> bool:
    """Return whether programs for the target can run on this machine."""
    return _override.get() in (None, _local_device())


def is_ampere_or_later() -> bool:
    """Return whether the target is an NVIDIA GPU of compute capability 8.0 or more."""
    generation = target().compute_capability.split(".")[0]
    return generation.isdigit() and int(generation) >= 8


@contextlib.contextmanager
def trace_for(target: Target | None) -> Iterator[None]:
    """Trace programs for another kind of device; None means the local one."""
    token = _override.set(target)
    try:
        yield
    finally:
        _override.reset(token)


def _local_device() -> Target:
    device = jax.devices()[0]
    return Target(device.platform, str(getattr(device, "compute_capability", "")))

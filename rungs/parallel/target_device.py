"""The kind of device that programs are traced for: the one at hand or, where a run is only planned,
another one."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import NamedTuple

import jax


class Target(NamedTuple):
    """A kind of device."""

    platform: str
    """As `jax.Device.platform`: cpu, gpu or tpu."""
    compute_capability: str = ""
    """Of NVIDIA's."""


_planned: ContextVar[Target | None] = ContextVar("planned", default=None)


def target() -> Target:
    """What is traced for."""
    return _planned.get() or _at_hand()


def platform() -> str:
    return target().platform


def is_at_hand() -> bool:
    """Whether what is traced can run here."""
    return _planned.get() in (None, _at_hand())


@contextlib.contextmanager
def planned(target: Target | None) -> Iterator[None]:
    """Trace for another kind of device; for the one at hand where it is None."""
    token = _planned.set(target)
    try:
        yield
    finally:
        _planned.reset(token)


def _at_hand() -> Target:
    device = jax.devices()[0]
    return Target(device.platform, str(getattr(device, "compute_capability", "")))

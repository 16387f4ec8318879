"""Exceptions that JAX raises because its environment variables ask for what isn't there."""

import os
import re
from types import TracebackType

from rungs.common.errors import UserError, reason

_BACKENDS = "jax._src.xla_bridge"
_MODULES = "jax._src.config", _BACKENDS
"""Where JAX reads its variables, and where it starts a platform."""
_OF_DEVICES = re.compile("PLATFORM|DEVICE|BACKEND")


def environment_error(error: Exception) -> UserError | None:
    """Return the error to report instead of an exception, None if it has another cause. It names
    the variable at fault if JAX does, else those that choose devices if one can't be had, else all.
    """
    given = [name for name in os.environ if name.startswith("JAX_")]
    origin = _origin(error.__traceback__)
    if not given or origin not in _MODULES:
        return None
    why = "no such device here" if isinstance(error, AssertionError) else reason(error)
    named = [name for name in given if re.search(rf"\b{name}\b", str(error), re.IGNORECASE)]
    of_devices = [name for name in given if origin == _BACKENDS and _OF_DEVICES.search(name)]
    return UserError(
        f"JAX does not start with the environment's {', '.join(named or of_devices or given)}:"
        f" {why}; unset or change what does not fit"
    )


def _origin(trace: TracebackType | None) -> str:
    """Return the module that raised."""
    module = ""
    while trace is not None:
        module, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return module

"""Exceptions that JAX raises because its environment variables ask for what isn't there."""

import os
from types import TracebackType

from rungs.common.errors import UserError, reason

_MODULES = "jax._src.config", "jax._src.xla_bridge"
"""Where JAX reads its variables, and where it starts a platform."""


def environment_error(error: Exception) -> UserError | None:
    """Return the error to report instead of an exception, None if it has another cause."""
    given = [name for name in os.environ if name.startswith("JAX_")]
    if not given or _origin(error.__traceback__) not in _MODULES:
        return None
    why = "no such device here" if isinstance(error, AssertionError) else reason(error)
    return UserError(
        f"JAX does not start with the environment's {', '.join(given)}: {why}; unset or change what"
        " does not fit"
    )


def _origin(trace: TracebackType | None) -> str:
    """Return the module that raised."""
    module = ""
    while trace is not None:
        module, trace = trace.tb_frame.f_globals.get("__name__", ""), trace.tb_next
    return module

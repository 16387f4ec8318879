"""End this process with one line if another process of the run is missing at the start or dies.

JAX's health check would abort it with a stack trace (exit code 134), unless it has a callback. But
jaxlib 0.10 cannot convert the callback's argument to Python: it throws `std::bad_cast` instead of
calling it. `connect` turns that into a RuntimeError; in the thread of the health check it ends in
C++'s terminate handler, so that is set too. JAX's own log lines before it say which process died.
"""

import contextlib
import ctypes
import functools
import logging
import os
import re
import threading
from collections.abc import Iterator

import jax
from jax._src.lib import _jax

from rungs.common import run_log
from rungs.common.errors import EXIT_FAILED, RunFailure, readable_line, reason
from rungs.common.run_log import TERMINAL

MESSAGE = (
    "another process of this run did not start in time, died, or lost its connection; its own"
    " output says why. Start all of them again to resume"
)
_LOST = re.compile(
    "gloo|nccl|connection|heartbeat|barrier|coordination|unavailable|deadline", re.IGNORECASE
)
_UNREADABLE = "std::bad_cast"
_ENDING = threading.Lock()


def end(cause: Exception | None = None) -> None:
    """Print and log the message, then end this process at once: JAX's own end would wait for the
    others."""
    message = MESSAGE
    if cause is not None and str(cause) != _UNREADABLE:
        message += f" ({readable_line(reason(cause))})"
    with _ENDING:
        run_log.log_to_file_only(logging.ERROR, message)
        TERMINAL.write(f"error: {message}\n")
        os._exit(EXIT_FAILED)


@contextlib.contextmanager
def end_if_lost() -> Iterator[None]:
    """End this process if the block fails because another process is gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, RunFailure) as error:
        cause = error.__cause__ if isinstance(error, RunFailure) else error
        if isinstance(cause, jax.errors.JaxRuntimeError) and _LOST.search(str(cause)):
            end(cause)
        raise


@contextlib.contextmanager
def end_instead_of_abort() -> Iterator[None]:
    """Have `end` called where the health check of a client created in this block would abort."""
    create = _jax.get_distributed_runtime_client
    with_callback = functools.partial(create, missed_heartbeat_callback=lambda *_: end())
    _set_terminate_handler()
    vars(_jax)["get_distributed_runtime_client"] = with_callback
    try:
        yield
    finally:
        vars(_jax)["get_distributed_runtime_client"] = create


_END_IN_C = ctypes.CFUNCTYPE(None)(end)
"""A global, so that it is never freed."""


def _set_terminate_handler() -> None:
    """Call std::set_terminate, where the C++ library is GNU's."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(_END_IN_C)

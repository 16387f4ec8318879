"""Connect a run's processes, and broadcast and agree between them; no-ops for a single process. If
another process is missing at the start or dies, this one ends, too."""

import contextlib
import functools
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.common import run_log
from rungs.common.errors import EXIT_FAILED, RunFailure, UserError, readable_line, reason
from rungs.parallel.sharding import size_along

START_TIMEOUT_SECONDS = 300
"""How long processes wait for each other at the start."""
HEARTBEAT_TIMEOUT_SECONDS = 30
"""A process without a heartbeat for this long counts as dead, and the others end."""
_LEAST_BUFFER_BYTES = 4096
_NO_ERROR = 0
_ERRORS_RAISED_BY_ALL: dict[int, type[Exception]] = {1: UserError, 2: RunFailure}
_OTHER_ERROR = 3
_PIECE_BYTES = 1 << 28
LOST_PROCESS = (
    "another process of this run did not start in time, died, or lost its connection; its own"
    " output says why. Start all of them again to resume"
)
_SIGNS_OF_LOSS = re.compile(
    "gloo|nccl|connection|heartbeat|barrier|coordination|unavailable|deadline", re.IGNORECASE
)


def join(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None
) -> None:
    """Connect to the other processes, before any other use of JAX. If some do not arrive in time,
    this one ends with a one-line message; if one dies later, by JAX's health check. Raises
    UserError if they are unknown.

    Args:
        coordinator: host:port of process 0.
        processes: their number. JAX detects what is None.
        process: index of this process, from 0."""
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # would catch SIGTERM
    try:
        jax.distributed.initialize(
            coordinator,
            processes,
            process,
            initialization_timeout=START_TIMEOUT_SECONDS,
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
            shutdown_timeout_seconds=HEARTBEAT_TIMEOUT_SECONDS,
        )
    except (ValueError, RuntimeError) as error:
        if is_multi_process():  # the others are known, but did not arrive
            _end(error)
        advice = "" if coordinator else "; give --coordinator, --processes and --process"
        message = f"the processes of this run cannot connect: {error}{advice}"
        raise UserError(message) from None


def _end(cause: Exception) -> None:
    """Print and log the message, then end this process at once, without waiting for the others."""
    message = f"{LOST_PROCESS} ({readable_line(reason(cause))})"
    run_log.log_to_file_only(logging.ERROR, message)
    run_log.TERMINAL.write(f"error: {message}\n")
    os._exit(EXIT_FAILED)


@contextlib.contextmanager
def end_if_lost() -> Iterator[None]:
    """End this process if the block fails because another process is gone."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, RunFailure) as error:
        cause = error.__cause__ if isinstance(error, RunFailure) else error
        if isinstance(cause, jax.errors.JaxRuntimeError) and _SIGNS_OF_LOSS.search(str(cause)):
            _end(cause)
        raise


def is_multi_process() -> bool:
    """Return whether this process has joined others."""
    return jax.distributed.is_initialized()


def is_sending_with_gloo() -> bool:
    """Return whether the processes' messages go through Gloo, as those of CPUs do. It confuses the
    messages of loops of a program that run at once."""
    return is_multi_process() and jax.default_backend() == "cpu"


def is_first_process() -> bool:
    """Return whether this is process 0, which writes everything that is written once."""
    return not is_multi_process() or jax.process_index() == 0


def broadcast_from_first(compute: Callable[[], str]) -> str:
    """Return, in every process, the string that the first process computes. A UserError or
    RunFailure there is raised in all; for other errors the others raise RuntimeError."""
    if not is_multi_process():
        return compute()
    code, text, failure = _NO_ERROR, "", None
    if is_first_process():
        try:
            text = compute()
        except Exception as error:  # without a broadcast, the others would wait forever
            text, failure, kinds = str(error), error, _ERRORS_RAISED_BY_ALL.items()
            code = next((code for code, kind in kinds if isinstance(error, kind)), _OTHER_ERROR)
    code, text = _broadcast(code, text)
    if failure is not None:
        raise failure
    if code in _ERRORS_RAISED_BY_ALL:
        raise _ERRORS_RAISED_BY_ALL[code](text)
    if code == _OTHER_ERROR:
        raise RuntimeError(f"process 0 failed: {text}")
    return text


def _broadcast(code: int, text: str) -> tuple[int, str]:
    content = bytes([code]) + text.encode()
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(content))))
    # few different sizes, as each is compiled
    buffer = np.zeros(max(1 << (length - 1).bit_length(), _LEAST_BUFFER_BYTES), np.uint8)
    if is_first_process():
        buffer[:length] = np.frombuffer(content, np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(buffer), np.uint8)[:length].tobytes()
    return received[0], received[1:].decode()


def run_on_first(function: Callable[[], object]) -> None:
    """Call a function in the first process only, while the others wait."""

    def compute() -> str:
        function()
        return ""

    broadcast_from_first(compute)


def wait_for_first() -> None:
    """Wait until the first process also calls this. If others ended earlier, JAX would give up
    after `HEARTBEAT_TIMEOUT_SECONDS` and end the first one."""
    run_on_first(lambda: None)


def check_all_agree(what: str, content: str) -> None:
    """Raise UserError in every process if one has another content than the first."""
    if not is_multi_process():
        return
    digest = np.frombuffer(hashlib.sha256(content.encode()).digest(), np.uint8)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    others = [str(index) for index, other in enumerate(digests) if (other != digests[0]).any()]
    if others:
        which = ", ".join(others)
        raise UserError(
            f"processes {which} have other {what} than process 0; use a shared file system"
        )


def connect(mesh: Mesh) -> None:
    """Open the connections between a mesh's devices while all processes are in step. On CPUs, a
    process half a minute late for its first collective would fail."""
    if not is_multi_process():
        return
    for axes in [*((axis,) for axis in mesh.axis_names), mesh.axis_names]:
        sharding, shape = NamedSharding(mesh, PartitionSpec(axes)), (size_along(mesh, *axes),)
        ones = jax.make_array_from_callback(shape, sharding, lambda _: np.ones(1))
        _any(ones, NamedSharding(mesh, PartitionSpec())).block_until_ready()


def gather_to_first(array: jax.Array) -> np.ndarray | None:
    """Return a host copy of the global array in the first process, None in the others. All must
    call this together; each device needs memory for one piece of the array only."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.array(array) if is_first_process() else None
    result = np.empty(array.shape, array.dtype) if is_first_process() else None
    rows = max(_PIECE_BYTES // (array.nbytes // len(array)), 1)
    for start in range(0, len(array), rows):
        piece = multihost_utils.process_allgather(array[start : start + rows], tiled=True)
        if result is not None:
            result[start : start + rows] = piece
    return result


def in_any_process(mesh: Mesh, flag: bool) -> bool:
    """Wait for all processes, and return whether the flag is set in any."""
    return bool(jax.device_get(_flag_of_all(mesh, flag))) if is_multi_process() else flag


class AnyProcess:
    """Like `in_any_process`, but with several processes the answer is one call late, so that no
    step waits for it."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._pending: jax.Array | None = None

    def __call__(self, flag: bool) -> bool:
        """Return whether the flag was set anywhere; with several processes, one call ago."""
        if not is_multi_process():
            return flag
        pending, self._pending = self._pending, _flag_of_all(self._mesh, flag)
        return pending is not None and bool(jax.device_get(pending))


def _flag_of_all(mesh: Mesh, flag: bool) -> jax.Array:
    """Return whether the flag is set in any process, still to be computed."""
    sharded = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    flags = jax.make_array_from_callback((mesh.size,), sharded, lambda _: np.array([flag]))
    return _any(flags, NamedSharding(mesh, PartitionSpec()))


@functools.partial(jax.jit, static_argnums=1)
def _any(flags: jax.Array, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(flags.any(), sharding)

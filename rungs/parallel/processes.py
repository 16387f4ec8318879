"""What the processes of a run, on several hosts, say to each other. One process is alone: every
function here does then what it says without any others."""

import functools
import hashlib
import math
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.common.errors import RunFailure, UserError
from rungs.parallel.launchers import Cluster

SECONDS_TO_START = 300
"""The processes wait so long for each other at the start."""
SECONDS_TO_NOTICE = 30
"""A process that gives no sign of life for so long is taken for dead; the others end, too."""
_MOST_BYTES = 4096
_RAISED_BY_ALL: dict[int, type[Exception]] = {1: UserError, 2: RunFailure}
_RAISED_BY_ONE = 3
_PIECE_BYTES = 1 << 28


def join(cluster: Cluster) -> None:
    """Meet the other processes; before any other use of JAX. Where some do not come in time, JAX
    ends this process.

    Raises:
        UserError: it is not to be found out who they are.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM
    try:
        jax.distributed.initialize(
            *cluster,
            initialization_timeout=SECONDS_TO_START,
            heartbeat_timeout_seconds=SECONDS_TO_NOTICE,
            shutdown_timeout_seconds=SECONDS_TO_NOTICE,
        )
    except (ValueError, RuntimeError) as error:
        named = "" if cluster.coordinator else "; name them: --coordinator, --processes, --process"
        raise UserError(f"the processes of this run did not meet: {error}{named}") from None


def is_one_of_several() -> bool:
    """Whether this process has joined others."""
    return jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this process is the one that writes what only one may write."""
    return not is_one_of_several() or jax.process_index() == 0


def said_by_first(say: Callable[[], str]) -> str:
    """What the first process finds, told to all; only it looks.

    Raises:
        UserError, RunFailure: in every process, where it does in the first. Where something else
            is raised there, RuntimeError in the others.
    """
    if not is_one_of_several():
        return say()
    text, failure = "", None
    if is_first():
        try:
            text = say()
        except Exception as error:  # the others would wait for ever
            text, failure = str(error), error
    kind, text = _told_by_first(_kind(failure), text)
    if failure is not None:
        raise failure
    if kind in _RAISED_BY_ALL:
        raise _RAISED_BY_ALL[kind](text)
    if kind == _RAISED_BY_ONE:
        raise RuntimeError(f"process 0 failed: {text}")
    return text


def _kind(failure: Exception | None) -> int:
    if failure is None:
        return 0
    kinds = (kind for kind, error in _RAISED_BY_ALL.items() if isinstance(failure, error))
    return next(kinds, _RAISED_BY_ONE)


def _told_by_first(kind: int, text: str) -> tuple[int, str]:
    buffer = np.zeros(_MOST_BYTES, np.uint8)
    content = np.frombuffer(bytes([kind]) + text.encode()[: _MOST_BYTES - 1], np.uint8)
    buffer[: len(content)] = content
    told = np.asarray(multihost_utils.broadcast_one_to_all(buffer), np.uint8).tobytes()
    return told[0], told[1:].rstrip(b"\0").decode(errors="ignore")


def done_by_first(do: Callable[[], object]) -> None:
    """Something that only the first process does, while the others wait."""

    def say() -> str:
        do()
        return ""

    said_by_first(say)


def refuse_to_differ(what: str, content: str) -> None:
    """See that all processes have the same before them.

    Raises:
        UserError: in all, where they have not.
    """
    if not is_one_of_several():
        return
    digest = np.frombuffer(hashlib.sha256(content.encode()).digest(), np.uint8)
    digests = np.asarray(multihost_utils.process_allgather(digest))
    others = [number for number, other in enumerate(digests) if (other != digests[0]).any()]
    if others:
        raise UserError(
            f"processes {', '.join(map(str, others))} have other {what} than process 0; they need a"
            " file system that they share"
        )


def connect(mesh: Mesh) -> None:
    """Open the ways between the devices of a mesh while all processes are at the same place: on
    CPUs one that comes half a minute late to the first exchange would find nobody."""
    if not is_one_of_several():
        return
    exchanges = [(axis,) for axis in mesh.axis_names] + [mesh.axis_names]
    for axes in exchanges:
        each = NamedSharding(mesh, PartitionSpec(axes))
        ones = jax.make_array_from_callback(
            (math.prod(mesh.shape[axis] for axis in axes),), each, lambda _: np.ones(1)
        )
        _any(ones, NamedSharding(mesh, PartitionSpec())).block_until_ready()


def whole(array: jax.Array) -> np.ndarray | None:
    """A copy of an array on the first process's host, wherever its parts are; None on the others.
    All processes ask at once; the devices of each hold a piece of it for a moment."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.array(array) if is_first() else None
    result = np.empty(array.shape, array.dtype) if is_first() else None
    rows = max(_PIECE_BYTES // (array.nbytes // len(array)), 1)
    for start in range(0, len(array), rows):
        piece = multihost_utils.process_allgather(array[start : start + rows], tiled=True)
        if result is not None:
            result[start : start + rows] = piece
    return result


class AnyHost:
    """Whether something is so on any host, told to all at the same step: where there are several,
    one step after it was asked, so that no step waits for the answer."""

    def __init__(self, mesh: Mesh) -> None:
        self._each = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._asked: jax.Array | None = None

    def __call__(self, is_so: bool) -> bool:
        """Ask; returns the answer to the question before, of one process to this one."""
        if not is_one_of_several():
            return is_so
        asked, self._asked = self._asked, self._ask(is_so)
        return asked is not None and bool(jax.device_get(asked))

    def _ask(self, is_so: bool) -> jax.Array:
        devices = self._each.mesh.size
        flags = jax.make_array_from_callback((devices,), self._each, lambda _: np.array([is_so]))
        return _any(flags, self._everywhere)


@functools.partial(jax.jit, static_argnums=1)
def _any(flags: jax.Array, place: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(flags.any(), place)

"""What the processes of a run, on several hosts, say to each other. One process is alone: every
function here does then what it says without any others."""

import functools
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from cluster import Cluster
from errors import UserError
from sharding import create_mesh

SECONDS_TO_START = 300
"""The processes wait so long for each other at the start."""
SECONDS_TO_NOTICE = 30
"""A process that gives no sign of life for so long is taken for dead; the others end, too."""
_MOST_BYTES = 4096
_PIECE_BYTES = 1 << 28
_ERROR = "error: "


def join(cluster: Cluster) -> None:
    """Meet the other processes; before any other use of JAX.

    Raises:
        UserError: they could not be found, or did not come in time.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            *cluster,
            initialization_timeout=SECONDS_TO_START,
            heartbeat_timeout_seconds=SECONDS_TO_NOTICE,
            shutdown_timeout_seconds=SECONDS_TO_NOTICE,
        )
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"the processes of this run did not meet: {reason}; name them with --coordinator,"
            " --processes and --process"
        ) from None


def is_one_of_several() -> bool:
    """Whether this process has joined others."""
    return jax.distributed.is_initialized()


def is_first() -> bool:
    """Whether this process is the one that writes what only one may write."""
    return not is_one_of_several() or jax.process_index() == 0


def said_by_first(say: Callable[[], str]) -> str:
    """What the first process finds, told to all; only it looks.

    Raises:
        UserError: in every process, where it does in the first.
    """
    if not is_one_of_several():
        return say()
    text = ""
    if is_first():
        try:
            text = say()
        except UserError as error:
            text = f"{_ERROR}{error}"
    buffer = np.zeros(_MOST_BYTES, np.uint8)
    content = np.frombuffer(text.encode()[:_MOST_BYTES], np.uint8)
    buffer[: len(content)] = content
    told = bytes(multihost_utils.broadcast_one_to_all(buffer)).rstrip(b"\0")
    text = told.decode(errors="ignore")
    if text.startswith(_ERROR):
        raise UserError(text.removeprefix(_ERROR))
    return text


def done_by_first(do: Callable[[], object]) -> None:
    """Something that only the first process does, while the others wait."""

    def say() -> str:
        do()
        return ""

    said_by_first(say)


def wait_for_all(what: str) -> None:
    """Wait until every process is here."""
    if is_one_of_several():
        multihost_utils.sync_global_devices(what)


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

    def __init__(self) -> None:
        self._asked: jax.Array | None = None

    def __call__(self, is_so: bool) -> bool:
        """Ask; returns the answer to the question before, of one process to this one."""
        if not is_one_of_several():
            return is_so
        asked, self._asked = self._asked, _any_of_all(is_so)
        return asked is not None and bool(jax.device_get(asked))


def _any_of_all(is_so: bool) -> jax.Array:
    """Whether it is so in any process; not waited for."""
    mesh = create_mesh((jax.device_count(), 1))
    each, all_of_them = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
    flags = np.full(jax.local_device_count(), is_so)
    every = jax.make_array_from_process_local_data(each, flags, (jax.device_count(),))
    return _any(every, all_of_them)


@functools.partial(jax.jit, static_argnums=1)
def _any(flags: jax.Array, place: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(flags.any(), place)

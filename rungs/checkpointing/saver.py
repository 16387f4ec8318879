"""Saves a run's checkpoints behind the running loop."""

import contextlib
import functools
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from rungs.checkpointing import checkpoint_folder, manifest, weights_file
from rungs.checkpointing.checkpoint_folder import BEST, LATEST, UNFINISHED
from rungs.checkpointing.manifest import CheckpointMeta
from rungs.checkpointing.weights_file import Weights, WeightsHeader
from rungs.common import disk
from rungs.common.disk import sync_to_disk
from rungs.config.run_config import RunConfig
from rungs.data.tokenizer import TOKENIZER_FILE
from rungs.model.gpt import GPT
from rungs.optim.optimizer import MultiSteps
from rungs.parallel import processes
from rungs.step.nonfinite import Flags, flags_of, not_finite
from rungs.step.state import host_copies, named_arrays

_BYTES_BESIDE_ARRAYS = 1 << 16
"""Room for headers, checksums and what Orbax notes."""
_CHUNK_BYTES = 1 << 26
"""What Orbax reads at once, so that a device reads little beyond its part of an array."""

log = logging.getLogger("rungs")


class _Saving(NamedTuple):
    """A checkpoint, as the loop leaves it to the thread that writes it."""

    meta: CheckpointMeta
    flags: Flags
    weights: Mapping[str, np.ndarray | None]
    """None where another process writes them."""
    needed_bytes: int
    """How much room it takes. Orbax compresses its part, by little."""


class _Begun(NamedTuple):
    """A checkpoint of which the folder stands, and to which Orbax writes."""

    folder: Path
    optimizer_saved: Any
    """Has the `result()`, when all is written."""


class Saver:
    """Writes checkpoints behind the running loop, one at a time. Every process writes its part of
    the optimizer's state; the first writes the rest, and makes the checkpoint whole.

    Args:
        folder: the run's `checkpoints/`.
        config: both configs; `keep_checkpoints` says what is pruned after each save.
        tokenizer_file: copied into each checkpoint, where there is one; read now, for later its
            dataset or checkpoint may be gone.
        before: called behind the loop, before each checkpoint is written.
        after: likewise, after each stands.
        starts_from: the weights that this start goes on from, if it does; their origin and, where
            the dataset has none, their tokenizer are passed on.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        tokenizer_file: Path | None,
        before: Callable[[], None],
        after: Callable[[], None],
        starts_from: Weights | None = None,
    ) -> None:
        self._folder, self._config = folder, config
        self._origin = starts_from.header.origin if starts_from else None
        tokenizer_file = tokenizer_file or (starts_from.tokenizer_file if starts_from else None)
        self._tokenizer = tokenizer_file.read_bytes() if tokenizer_file else None
        self._before, self._after = before, after
        self._is_there = folder.is_dir()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the save under way; raises what it failed with."""
        self._worker.shutdown(wait=True)
        self.wait()

    def save(self, model: GPT, optimizer: MultiSteps, meta: CheckpointMeta) -> Flags:
        """Start saving; returns when the arrays may change. An earlier save is waited for.

        Returns:
            Which arrays are finite, still being found out. Where one is not, there will be no such
            checkpoint.

        Raises:
            RunFailure: it cannot be written, or the earlier one could not.
        """
        self.wait()
        flags = flags_of(named_arrays(model) | named_arrays(optimizer))
        begin = self._with_others if processes.is_one_of_several() else self._alone
        self._writing = self._worker.submit(begin(model, optimizer, meta, flags))
        return flags

    def raise_failure(self) -> None:
        """Raise what a save behind the loop failed with, if one did."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def wait(self) -> None:
        """Wait for the save under way; raises what it failed with."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _alone(
        self, model: GPT, optimizer: MultiSteps, meta: CheckpointMeta, flags: Flags
    ) -> Callable[[], None]:
        """What writes a checkpoint, all of it behind the loop."""
        vocab_size = self._config.model.vocab_size
        weights, moments = host_copies(model, vocab_size), host_copies(optimizer, vocab_size)
        saving = _Saving(meta, flags, weights, self._needed_bytes(weights, moments))

        def write() -> None:
            with self._writing_of(saving):
                begun = self._begin(saving, _on_host(moments))
            self._finish(saving, begun)

        return write

    def _with_others(
        self, model: GPT, optimizer: MultiSteps, meta: CheckpointMeta, flags: Flags
    ) -> Callable[[], None]:
        """What finishes a checkpoint that all processes have begun: they meet for that, which only
        their loops may do, as those meet for their steps."""
        vocab_size = self._config.model.vocab_size
        weights, moments = named_arrays(model, vocab_size), named_arrays(optimizer, vocab_size)
        wholes = {name: processes.whole(array) for name, array in weights.items()}
        saving = _Saving(meta, flags, wholes, self._needed_bytes(weights, moments))
        with self._writing_of(saving):
            begun = self._begin(saving, moments)

        def wait() -> None:
            with self._writing_of(saving):
                begun.optimizer_saved.result()

        return functools.partial(self._finish, saving, begun) if processes.is_first() else wait

    def _needed_bytes(self, *arrays: Mapping[str, jax.Array | np.ndarray]) -> int:
        held = sum(array.nbytes for part in arrays for array in part.values())
        return held + len(self._tokenizer or b"") + _BYTES_BESIDE_ARRAYS

    def _writing_of(self, saving: _Saving) -> contextlib.AbstractContextManager[None]:
        """Whatever a save fails with ends the run with a line."""
        return disk.writing(self._folder, _what(saving), saving.needed_bytes, failures=Exception)

    def _begin(self, saving: _Saving, moments: Mapping[str, jax.Array | np.ndarray]) -> _Begun:
        new_folder = functools.partial(self._new_folder, saving)
        folder = self._folder / processes.said_by_first(new_folder)
        with _removed_on_failure(folder):
            return _Begun(folder, _save_behind(folder / manifest.OPTIMIZER_FOLDER, moments))

    def _new_folder(self, saving: _Saving) -> str:
        """Make the folder of a checkpoint; returns its name."""
        step = saving.meta.global_step
        if self._is_there and not self._folder.is_dir():
            log.warning(
                "%s: was removed with all that was saved; made anew for the checkpoint of step %d",
                self._folder,
                step,
            )
        self._folder.mkdir(exist_ok=True)
        self._is_there = True
        sync_to_disk(self._folder.parent)
        disk.refuse_without_room(self._folder, _what(saving), saving.needed_bytes)
        name = UNFINISHED + checkpoint_folder.checkpoint_name(self._folder, step)
        (self._folder / name).mkdir()
        return name

    def _finish(self, saving: _Saving, begun: _Begun) -> None:
        with self._writing_of(saving):
            with _removed_on_failure(begun.folder):
                self._fill(begun, saving)
            if not_finite(saving.flags):  # the loop ends, and says so
                shutil.rmtree(begun.folder)
                return
            begun.folder.rename(self._folder / begun.folder.name.removeprefix(UNFINISHED))
            sync_to_disk(self._folder)
        with disk.writing(self._folder, f"the names {BEST} and {LATEST}"):
            checkpoint_folder.relink(self._folder)
            checkpoint_folder.prune(self._folder, self._config.train.keep_checkpoints)
        self._after()

    def _fill(self, begun: _Begun, saving: _Saving) -> None:
        header = WeightsHeader(*self._config, saving.meta.tokenizer, self._origin)
        limit = self._config.train.max_weights_file_bytes
        try:
            self._before()
            needed = weights_file.write_weights(begun.folder, saving.weights, header, limit)
            if self._tokenizer is not None:
                (begun.folder / TOKENIZER_FILE).write_bytes(self._tokenizer)
        finally:
            # Orbax's threads, left alone, would keep the process for long.
            begun.optimizer_saved.result()
        manifest.seal(begun.folder, saving.meta, needed)


def _what(saving: _Saving) -> str:
    return f"the checkpoint of step {saving.meta.global_step}"


@contextlib.contextmanager
def _removed_on_failure(unfinished: Path) -> Iterator[None]:
    """Make room again where a checkpoint is not finished, unless other processes still write it."""
    try:
        yield
    except Exception:
        if not processes.is_one_of_several():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _on_host(copies: dict[str, np.ndarray]) -> Mapping[str, jax.Array | np.ndarray]:
    """As arrays of JAX: where Orbax cannot write those of NumPy, its threads say so at length."""
    try:
        host = jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS names others only
        return copies
    return jax.device_put(copies, host)


def _save_behind(folder: Path, arrays: Mapping[str, jax.Array | np.ndarray]) -> Any:
    """Begin to save arrays with Orbax; returns when they may change, what has the `result()`."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.enable_write_sharding_file = False
    context.array.saving.storage_options.chunk_byte_size = _CHUNK_BYTES
    # Else a program of its own cuts each replica's slice out of each array, while training waits.
    context.array.saving.use_replica_parallel = False
    # Where a folder cannot be made behind the loop, threads wait for it for five minutes.
    context.asynchronous.create_directories_asynchronously = False
    with context:
        return ocp.save_async(folder.resolve(), arrays)

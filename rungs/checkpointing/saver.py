"""Checkpoints written in the background while training continues."""

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from rungs.checkpointing import (
    checkpoint_folder,
    manifest,
    optimizer_state,
    retention,
    weights_file,
)
from rungs.checkpointing.checkpoint_folder import LINKS, UNFINISHED
from rungs.checkpointing.manifest import EMA_FOLDER, PUBLISHED_FOLDER, CheckpointMeta
from rungs.checkpointing.published import read_published
from rungs.checkpointing.weights_file import Weights, WeightsHeader
from rungs.common import disk
from rungs.config.run_config import AnyRunConfig
from rungs.data.chats.chat_template import read_template_files
from rungs.data.tokenizer_files import read_tokenizer_files
from rungs.model.gpt import GPT
from rungs.optim.skipping_optimizer import WEIGHTS, SkippingOptimizer
from rungs.parallel import processes
from rungs.parallel.devices import host_device
from rungs.step.nonfinite import Flags, finite_flags, nonfinite_names
from rungs.step.state import host_copies, named_arrays

_EXTRA_BYTES = 1 << 16
"""Disk space for headers, checksums and Orbax's metadata."""

log = logging.getLogger("rungs")


class _Snapshot(NamedTuple):
    """Everything that the training loop hands to the thread that writes a checkpoint."""

    meta: CheckpointMeta
    flags: Flags
    weights: Mapping[str, np.ndarray | None]
    """None for arrays that another process writes."""
    averaged: Mapping[str, np.ndarray | None] | None
    """All weights, the trained ones averaged; None without ema_decay."""
    needed_bytes: int
    """Disk space that it needs, with an estimate for metadata."""

    @property
    def description(self) -> str:
        return f"the checkpoint of step {self.meta.global_step}"


class _Unfinished(NamedTuple):
    """A checkpoint folder that Orbax is writing to."""

    folder: Path
    optimizer_save: Any
    """Orbax's response; its `result()` waits until the optimizer state is saved."""


class Saver(contextlib.AbstractContextManager["Saver"]):
    """Writes checkpoints of a run in the background, one at a time. Each process writes its part of
    the optimizer state; the first also writes everything else and completes the checkpoint.

    Each checkpoint includes the tokenizer file and chat template, which are read now because their
    dataset or checkpoint may be gone later. The origin and published files of the starting weights
    are copied too, and their tokenizer if the dataset has none.

    `before` is called in the background before each checkpoint is written, and each of `after` once
    it is complete. `check` raises RunFailure if another run has replaced this one in its folder;
    then nothing is changed there."""

    def __init__(
        self,
        folder: Path,
        config: AnyRunConfig,
        tokenizer_file: Path | None,
        before: Callable[[], None],
        after: Sequence[Callable[[], None]],
        starts_from: Weights | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._folder, self._config = folder, config
        self._origin = starts_from.header.origin if starts_from else None
        tokenizer_file = tokenizer_file or (starts_from.tokenizer_file if starts_from else None)
        published = read_published(starts_from)
        self._copied = {f"{PUBLISHED_FOLDER}/{name}": published[name] for name in published}
        if tokenizer_file:
            self._copied |= read_tokenizer_files(tokenizer_file)
            self._copied |= read_template_files(tokenizer_file.parent)
        self._before, self._after, self._check = before, after, check
        self._is_there = folder.is_dir()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None
        self.seconds = 0.0
        """Duration of the last complete save; 0 before the first."""

    def __exit__(self, *_: object) -> None:
        """Wait for the pending save; raise its failure."""
        self._worker.shutdown(wait=True)
        self.wait()

    def save(self, model: GPT, optimizer: SkippingOptimizer, meta: CheckpointMeta) -> Flags:
        """Start saving; return once the arrays may change, with flags, possibly still being
        computed, of which arrays are finite. If one is not, no checkpoint appears. Waits for the
        pending save first. Raises RunFailure if this or the pending one cannot be written."""
        self.wait()
        begun = time.monotonic()
        flags = finite_flags(named_arrays(model) | named_arrays(optimizer))
        begin = self._begin_shared if processes.is_multi_process() else self._begin_alone
        write = begin(model, optimizer, meta, flags)

        def write_and_measure() -> None:
            write()
            self.seconds = time.monotonic() - begun

        self._pending = self._worker.submit(write_and_measure)
        return flags

    def raise_failure(self) -> None:
        """Raise the error of the pending save if it has already failed."""
        if self._pending is not None and self._pending.done():
            self._pending.result()

    def wait(self) -> None:
        """Wait for the pending save; raise its error."""
        if self._pending is not None:
            self._pending.result()
            self._pending = None

    def _begin_alone(
        self, model: GPT, optimizer: SkippingOptimizer, meta: CheckpointMeta, flags: Flags
    ) -> Callable[[], None]:
        """Copy the arrays to the host; return a function that writes the whole checkpoint."""
        vocab_size = self._config.model.vocab_size
        weights, moments = host_copies(model, vocab_size), host_copies(optimizer, vocab_size)
        averaged = _take_averaged(weights, moments)
        needed = self._needed_bytes(weights, moments, averaged or {})
        snapshot = _Snapshot(meta, flags, weights, averaged, needed)

        def write() -> None:
            with self._failures_of(snapshot):
                try:
                    unfinished = self._write(snapshot, moments)
                except Exception as error:
                    if not self._makes_room_after(error, snapshot):
                        raise
                    unfinished = self._write(snapshot, moments)
            self._finish(snapshot, unfinished)

        return write

    def _begin_shared(
        self, model: GPT, optimizer: SkippingOptimizer, meta: CheckpointMeta, flags: Flags
    ) -> Callable[[], None]:
        """Create the checkpoint together with the other processes; return a function that finishes
        it. As this synchronizes the processes, only the training loop may do it."""
        vocab_size = self._config.model.vocab_size
        weights, moments = named_arrays(model, vocab_size), named_arrays(optimizer, vocab_size)
        averaged = _take_averaged(weights, moments)
        needed = self._needed_bytes(weights, moments, averaged or {})
        gathered = None if averaged is None else _gathered(averaged)
        snapshot = _Snapshot(meta, flags, _gathered(weights), gathered, needed)
        with self._failures_of(snapshot):
            unfinished = self._create(snapshot, moments)

        def write() -> None:
            with self._failures_of(snapshot):
                if processes.is_first_process():
                    self._write_rest(unfinished, snapshot)
                else:
                    unfinished.optimizer_save.result()
            if processes.is_first_process():
                self._finish(snapshot, unfinished)

        return write

    def _needed_bytes(self, *arrays: Mapping[str, jax.Array | np.ndarray]) -> int:
        held = sum(array.nbytes for part in arrays for array in part.values())
        return held + sum(map(len, self._copied.values())) + _EXTRA_BYTES

    @contextlib.contextmanager
    def _failures_of(self, snapshot: _Snapshot) -> Iterator[None]:
        """Turn any exception into a failure of the run with a one-line message."""
        what = snapshot.description
        with disk.writing(self._folder, what, snapshot.needed_bytes, failures=Exception):
            try:
                yield
            except Exception:
                self._check()
                raise

    def _write(self, snapshot: _Snapshot, moments: dict[str, np.ndarray]) -> _Unfinished:
        """Write a whole checkpoint into an unfinished folder."""
        unfinished = self._create(snapshot, _as_jax_arrays(moments))
        self._write_rest(unfinished, snapshot)
        return unfinished

    def _makes_room_after(self, error: Exception, snapshot: _Snapshot) -> bool:
        """Whether a save failed for lack of space and old checkpoints were deleted, so it can be
        retried. Never with several processes, which would have to agree."""
        reason = disk.reason_of_no_space(error)
        if reason is None:
            return False
        self._check()
        keep = self._config.train.keep_checkpoints
        if not retention.make_room_in_full_disk(self._folder, keep):
            return False
        log.warning("%s: %s: %s; writing it again", self._folder, snapshot.description, reason)
        return True

    def _create(
        self, snapshot: _Snapshot, moments: Mapping[str, jax.Array | np.ndarray]
    ) -> _Unfinished:
        new_folder = functools.partial(self._new_folder, snapshot)
        folder = self._folder / processes.broadcast_from_first(new_folder)
        with _removed_on_failure(folder):
            return _Unfinished(folder, optimizer_state.save_async(folder, moments))

    def _new_folder(self, snapshot: _Snapshot) -> str:
        """Make the folder of an unfinished checkpoint; return its name."""
        self._check()
        step = snapshot.meta.global_step
        if self._is_there and not self._folder.is_dir():
            log.warning(
                "%s: was removed with all checkpoints in it; created again for %s",
                *(self._folder, snapshot.description),
            )
        self._folder.mkdir(exist_ok=True)
        self._is_there = True
        disk.sync_to_disk(self._folder.parent)
        keep = self._config.train.keep_checkpoints
        retention.make_room(self._folder, keep, snapshot.needed_bytes)
        disk.check_free_space(self._folder, snapshot.description, snapshot.needed_bytes)
        name = UNFINISHED + checkpoint_folder.checkpoint_name(self._folder, step)
        (self._folder / name).mkdir()
        return name

    def _finish(self, snapshot: _Snapshot, unfinished: _Unfinished) -> None:
        """Rename a written checkpoint, update the links and delete old checkpoints."""
        with self._failures_of(snapshot):
            if nonfinite_names(snapshot.flags):  # the training loop reports it and stops
                disk.remove(unfinished.folder)
                return
            name = unfinished.folder.name.removeprefix(UNFINISHED)
            disk.put_in_place(unfinished.folder, self._folder / name)
        with disk.writing(self._folder, f"the names {' and '.join(LINKS)}"):
            self._check()
            checkpoint_folder.update_links(self._folder)
            self._check()
            retention.delete_old(self._folder, self._config.train.keep_checkpoints)
        for done in self._after:
            done()

    def _write_rest(self, unfinished: _Unfinished, snapshot: _Snapshot) -> None:
        """Write everything except the optimizer state, then wait for that."""
        with _removed_on_failure(unfinished.folder):
            self._write_files(unfinished, snapshot)
            self._check()  # the folder may be in a run that replaced this one

    def _write_files(self, unfinished: _Unfinished, snapshot: _Snapshot) -> None:
        header = WeightsHeader(*self._config, snapshot.meta.tokenizer, self._origin)
        limit = self._config.train.max_weights_file_bytes
        try:
            self._check()
            self._before()
            needed = write_model(unfinished.folder, snapshot.weights, header, limit, self._copied)
            if snapshot.averaged is not None:
                folder = unfinished.folder / EMA_FOLDER
                folder.mkdir()
                files = write_model(folder, snapshot.averaged, header, limit, self._copied)
                needed += [f"{EMA_FOLDER}/{name}" for name in files]
                manifest.write_checksums(folder)
        finally:
            # Otherwise Orbax's threads would keep the process alive for a long time.
            unfinished.optimizer_save.result()
        if damage := optimizer_state.damage(unfinished.folder):
            raise RuntimeError(damage)
        manifest.write_manifest(unfinished.folder, snapshot.meta, needed)


def write_model(
    folder: Path,
    weights: Mapping[str, Any],
    header: WeightsHeader,
    max_file_bytes: int,
    copied: Mapping[str, bytes],
) -> list[str]:
    """Write weights and the files beside them, given by name. Return as `write_weights`."""
    files = weights_file.write_weights(folder, weights, header, max_file_bytes)
    for name, content in copied.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return files


A = TypeVar("A")


def _take_averaged(weights: Mapping[str, A], moments: dict[str, A]) -> dict[str, A] | None:
    """Remove the averaged weights from the optimizer state, and return them with those that are not
    trained; None if there are none."""
    names = [name for name in moments if name.startswith(WEIGHTS)]
    averaged = {name.removeprefix(WEIGHTS): moments.pop(name) for name in names}
    return {**weights, **averaged} if averaged else None


def _gathered(arrays: Mapping[str, jax.Array]) -> dict[str, np.ndarray | None]:
    return {name: processes.gather_to_first(array) for name, array in arrays.items()}


@contextlib.contextmanager
def _removed_on_failure(unfinished: Path) -> Iterator[None]:
    """Free the disk space of a failed checkpoint, unless other processes still write to it."""
    try:
        yield
    except Exception:
        if not processes.is_multi_process():
            disk.try_to_remove(unfinished)
        raise


def _as_jax_arrays(copies: dict[str, np.ndarray]) -> Mapping[str, jax.Array | np.ndarray]:
    """Return host arrays as JAX arrays if possible. When Orbax fails to write NumPy arrays, its
    threads print long tracebacks."""
    host = host_device()
    return copies if host is None else jax.device_put(copies, host)

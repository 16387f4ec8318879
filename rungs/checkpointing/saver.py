"""Checkpoints written in the background while training continues."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing import (
    checkpoint_folder,
    manifest,
    optimizer_state,
    weights_file,
)
from rungs.checkpointing.checkpoint_folder import IMPORTED, LINKS, UNFINISHED
from rungs.checkpointing.manifest import EMA_FOLDER, PUBLISHED_FOLDER, CheckpointMeta
from rungs.checkpointing.published import read_published
from rungs.checkpointing.weights_file import BASE, Weights, WeightsHeader
from rungs.common import disk
from rungs.common.errors import UserError
from rungs.config.run_config import AnyRunConfig
from rungs.data.text.chat_template import read_template_files
from rungs.data.text.tokenizer_files import read_tokenizer_files
from rungs.model.gpt import GPT
from rungs.model.lora import LOW_RANK_NAMES
from rungs.optim.skipping_optimizer import WEIGHTS, SkippingOptimizer
from rungs.parallel import devices, jax_setup, processes
from rungs.parallel.devices import host_device
from rungs.step.nonfinite import Flags, finite_flags, nonfinite_names
from rungs.step.state import host_copies, named_arrays

_EXTRA_BYTES = 1 << 16
"""Disk space for headers, checksums and Orbax's metadata."""


def describe_checkpoint(
    config: AnyRunConfig, mesh: Mesh, step: int, total_steps: int, **measured: Any
) -> CheckpointMeta:
    """Return the content of a checkpoint's `meta.json`, without checksums. `measured` has the other
    keys of `CheckpointMeta`: losses, tokens, data."""
    return CheckpointMeta(
        global_step=step,
        total_steps=total_steps,
        model=config.model.as_json(),
        train=config.train.as_json(),
        sharding=devices.recorded_sharding(config.train, mesh),
        created=checkpoint_folder.utc_now().isoformat(),
        versions=manifest.installed_versions(),
        environment=jax_setup.recorded(),
        **measured,
    )


@dataclasses.dataclass
class _Saving:
    """A checkpoint that is being written."""

    meta: CheckpointMeta
    flags: Flags
    weights: Mapping[str, np.ndarray | None]
    """With LoRA only the adapter's. None for arrays that another process writes."""
    averaged: Mapping[str, np.ndarray | None] | None
    """These weights, the trained ones averaged; None without ema_decay."""
    base: Mapping[str, np.ndarray | None]
    """What LoRA adapts, unless it is saved already."""
    needed_bytes: int
    """Disk space that it needs, with an estimate for metadata."""
    folder: Path = Path()
    """Its folder until it is complete."""
    optimizer: Any = None
    """Orbax's response; its `result()` waits until the optimizer state is saved."""

    @property
    def description(self) -> str:
        return f"the checkpoint of step {self.meta.global_step}"


class Saver(contextlib.AbstractContextManager["Saver"]):
    """Writes checkpoints of a run in the background, one at a time. Each process writes its part of
    the optimizer state; the first also writes everything else and completes the checkpoint.

    Each checkpoint includes the tokenizer file and chat template, which are read now because their
    dataset or checkpoint may be gone later. The origin and published files of the starting weights
    are copied too, and their tokenizer if the dataset has none. With LoRA checkpoints hold the
    adapter; the first one writes its base beside it.

    `before` is called in the background before each checkpoint is written, and each of `after` once
    it is complete."""

    def __init__(
        self,
        folder: Path,
        config: AnyRunConfig,
        tokenizer_file: Path | None,
        before: Callable[[], None],
        after: Sequence[Callable[[], None]],
        starts_from: Weights | None = None,
    ) -> None:
        self._folder, self._config = folder, config
        self._origin = starts_from.header.origin if starts_from else None
        self._base = starts_from.header.base if starts_from else None
        self._has_base = self._base is not None
        tokenizer_file = tokenizer_file or (starts_from.tokenizer_file if starts_from else None)
        published = read_published(starts_from)
        self._copied = {f"{PUBLISHED_FOLDER}/{name}": published[name] for name in published}
        if tokenizer_file:
            self._copied |= read_tokenizer_files(tokenizer_file)
            self._copied |= read_template_files(tokenizer_file.parent)
        self._before, self._after = before, after
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
        is_shared, vocab_size = processes.is_multi_process(), self._config.model.vocab_size
        read: Callable[..., dict[str, Any]] = named_arrays if is_shared else host_copies
        weights = read(model, vocab_size, optimizer.wrt if self._has_base else ...)
        moments, base = read(optimizer, vocab_size), dict[str, Any]()
        if self._config.train.lora and not self._has_base:
            base, self._has_base = _take_base(weights), True
        averaged = _take_averaged(weights, moments)
        parts = (weights, moments, averaged or {}, base)
        held = [array.nbytes for part in parts for array in part.values()]
        needed = sum(held) + sum(map(len, self._copied.values())) + _EXTRA_BYTES
        if is_shared:
            weights, base = _gathered(weights), _gathered(base)
            averaged = None if averaged is None else _gathered(averaged)
        saving = _Saving(meta, flags, weights, averaged, base, needed)
        if is_shared:  # Orbax synchronizes the processes, which only the training loop may do
            with self._failures_of(saving):
                self._create(saving, moments)

        def write() -> None:
            with self._failures_of(saving):
                if not is_shared:
                    self._create(saving, _as_jax_arrays(moments))
                self._write(saving)
            if processes.is_first_process():
                self._finish(saving)
            self.seconds = time.monotonic() - begun

        self._pending = self._worker.submit(write)
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

    def _failures_of(self, saving: _Saving) -> contextlib.AbstractContextManager[None]:
        """Turn any exception into a failure of the run with a one-line message."""
        what = saving.description
        return disk.writing(self._folder, what, saving.needed_bytes, failures=Exception)

    def _create(self, saving: _Saving, moments: Mapping[str, jax.Array | np.ndarray]) -> None:
        """Make the folder of an unfinished checkpoint, and start saving the optimizer state."""
        new_folder = functools.partial(self._new_folder, saving)
        saving.folder = self._folder / processes.broadcast_from_first(new_folder)
        with _removed_on_failure(saving.folder):
            saving.optimizer = optimizer_state.save_async(saving.folder, moments)

    def _new_folder(self, saving: _Saving) -> str:
        self._folder.mkdir(exist_ok=True)
        disk.sync_to_disk(self._folder.parent)
        keep, needed = self._config.train.keep_checkpoints, saving.needed_bytes
        checkpoint_folder.make_room(self._folder, keep, needed)
        disk.check_free_space(self._folder, saving.description, needed)
        name = checkpoint_folder.checkpoint_name(self._folder, saving.meta.global_step)
        (self._folder / f"{UNFINISHED}{name}").mkdir()
        return f"{UNFINISHED}{name}"

    def _write(self, saving: _Saving) -> None:
        """Write everything except the optimizer state, and wait for that."""
        with _removed_on_failure(saving.folder):
            try:
                if processes.is_first_process():
                    self._before()
                    if saving.base:
                        self._write_base(saving.base, saving.meta)
                    self._write_model(saving.folder, saving.weights, saving.meta)
                    if saving.averaged is not None:
                        folder = saving.folder / EMA_FOLDER
                        folder.mkdir()
                        self._write_model(folder, saving.averaged, saving.meta)
                        manifest.write_checksums(folder)
            finally:
                # Otherwise Orbax's threads would keep the process alive for a long time.
                saving.optimizer.result()
            if processes.is_first_process():
                manifest.write_manifest(saving.folder, self._rated(saving))

    def _rated(self, saving: _Saving) -> CheckpointMeta:
        """Return the `meta.json` with whether `best` will point to this checkpoint."""
        new = manifest.Checkpoint(saving.folder, saving.meta)
        best = checkpoint_folder.best_of([*checkpoint_folder.list_checkpoints(self._folder), new])
        return saving.meta.model_copy(update={"is_best": best is new})

    def _write_base(self, base: Mapping[str, Any], meta: CheckpointMeta) -> None:
        """Write the base, unless the run has it as the imported model or from an earlier start."""
        sha256 = weights_file.tensors_checksum(base, base.__getitem__)
        own = self._folder / f"{BASE}{sha256[:16]}"
        if not any(_holds(place, sha256) for place in (self._folder / IMPORTED, own)):
            header = WeightsHeader(self._config.model, None, meta.tokenizer, self._origin)
            with disk.atomic_folder(own, replace=True) as new:
                limit = self._config.train.max_weights_file_bytes
                weights_file.write_weights(new, base, header, limit)
                manifest.write_checksums(new)
        self._base = sha256

    def _write_model(self, folder: Path, weights: Mapping[str, Any], meta: CheckpointMeta) -> None:
        header = WeightsHeader(*self._config, meta.tokenizer, self._origin, self._base)
        limit = self._config.train.max_weights_file_bytes
        weights_file.write_weights(folder, weights, header, limit)
        for name, content in self._copied.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)

    def _finish(self, saving: _Saving) -> None:
        """Rename a written checkpoint, update the links and delete old checkpoints."""
        with self._failures_of(saving):
            if nonfinite_names(saving.flags):  # the training loop reports it and stops
                disk.remove(saving.folder)
                return
            name = saving.folder.name.removeprefix(UNFINISHED)
            disk.put_in_place(saving.folder, self._folder / name)
        with disk.writing(self._folder, f"the names {' and '.join(LINKS)}"):
            checkpoint_folder.update_links(self._folder)
            checkpoint_folder.delete_old(self._folder, self._config.train.keep_checkpoints)
        for done in self._after:
            done()


A = TypeVar("A")


def _take_averaged(weights: Mapping[str, A], moments: dict[str, A]) -> dict[str, A] | None:
    """Remove the averaged weights from the optimizer state, and return them with those that are not
    trained; None if there are none."""
    names = [name for name in moments if name.startswith(WEIGHTS)]
    averaged = {name.removeprefix(WEIGHTS): moments.pop(name) for name in names}
    return {**weights, **averaged} if averaged else None


def _take_base(weights: dict[str, A]) -> dict[str, A]:
    """Remove what LoRA doesn't train from the weights, and return it."""
    names = [name for name in weights if not name.endswith(LOW_RANK_NAMES)]
    return {name: weights.pop(name) for name in names}


def _holds(folder: Path, sha256: str) -> bool:
    with contextlib.suppress(UserError):
        return Weights(folder / weights_file.WEIGHTS_FILE).sha256() == sha256
    return False


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

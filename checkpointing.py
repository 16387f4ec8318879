"""The checkpoints of a run: saved behind the running loop, linked, pruned, restored.

The only writer under `checkpoints/`. A checkpoint is written under a name with a leading dot and
renamed when it is whole, so a crash leaves either all of it or nothing that looks like one.
"""

import contextlib
import datetime
import functools
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

import checkpoint
import disk
import hosts
import tokenization
import weights_file
from checkpoint import Checkpoint, CheckpointMeta, read_checkpoint, refuse_damaged
from config import RunConfig
from dataset import find_datasets_dir, folder_of
from disk import sync_to_disk
from errors import UserError
from lora import LOW_RANK_NAMES, MergedWeights
from model import GPT
from optimizer import MultiSteps
from paths import is_file, is_folder, is_plain_name, is_there
from run_folder import RUNS, known_runs
from state import AbstractModel, AbstractState, named_arrays
from tokenization import Tokenizer
from weights_file import Weights, WeightsHeader
from weights_index import WEIGHTS_FILE, file_or_index

BEST, LATEST, IMPORTED = "best", "latest", "imported"
CHECKPOINT_NAMES = "[0-9]*-step-*"
UNFINISHED = "."
"""Prefix of a checkpoint being written or deleted, and of a link being made."""

_STAMP = "%Y%m%dZ%H%M%S"
_BYTES_BESIDE_ARRAYS = 1 << 16
"""Room for headers, checksums and what Orbax notes."""

log = logging.getLogger("rungs")


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """All checkpoints under `checkpoints/` whose meta.json can be read, by step."""
    found = []
    for path in folder.glob(CHECKPOINT_NAMES):
        with contextlib.suppress(UserError):
            found.append(read_checkpoint(path))
    return sorted(found, key=lambda c: c.order)


def unreadable_checkpoints(folder: Path) -> list[Path]:
    """Those whose meta.json is missing or damaged."""
    readable = {c.folder for c in list_checkpoints(folder)}
    return sorted(set(folder.glob(CHECKPOINT_NAMES)) - readable)


def newest_whole(folder: Path) -> Checkpoint | None:
    """The checkpoint with the highest step of which every file is as it was saved."""
    for path in unreadable_checkpoints(folder):
        log.warning("%s: damaged (meta.json); not used", path)
    for candidate in reversed(list_checkpoints(folder)):
        if not (damage := candidate.damage()):
            if strays := candidate.strays():
                added = ", ".join(strays)
                log.warning("%s: was saved without %s; not read", candidate.folder, added)
            return candidate
        log.warning("%s: damaged (%s); not used", candidate.folder, ", ".join(damage))
    return None


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """The one with the lowest selection loss; the earlier of two alike."""
    rivals = [(c.meta.selection_loss, c.order, c) for c in checkpoints]
    return min((r for r in rivals if r[0] is not None), default=(None, None, None))[2]


def relink(folder: Path) -> None:
    """Point `best` and `latest` at the checkpoints that are."""
    checkpoints = list_checkpoints(folder)
    latest = checkpoints[-1] if checkpoints else None
    for name, target in ((BEST, best_of(checkpoints)), (LATEST, latest)):
        if target is not None:
            _point(folder / name, target.folder.name)


def prune(folder: Path, keep: int) -> None:
    """Delete all but the last `keep` checkpoints and the best; all stay where `keep` is −1."""
    checkpoints = list_checkpoints(folder)
    best = best_of(checkpoints)
    for old in checkpoints[:-keep] if keep > 0 else ():
        if old is not best:
            doomed = old.folder.with_name(UNFINISHED + old.folder.name)
            with contextlib.suppress(FileNotFoundError):  # the user was faster
                old.folder.rename(doomed)
                shutil.rmtree(doomed)


def clean_up(folder: Path) -> None:
    """After a crash: drop what was half-written or half-deleted, and set the links right."""
    for path in folder.glob(UNFINISHED + CHECKPOINT_NAMES):
        shutil.rmtree(path)
    relink(folder)


class Saver:
    """Writes checkpoints behind the running loop, one at a time. Every process writes its part of
    the optimizer's state; the first writes the rest, and makes the checkpoint whole.

    Args:
        folder: the run's `checkpoints/`.
        config: both configs; `keep_checkpoints` says what is pruned after each save.
        tokenizer_file: copied into each checkpoint, where there is one; read now, for later its
            dataset or checkpoint may be gone.
        after: called behind the loop, after each checkpoint stands.
        before: the weights that this start goes on from, if it does; their origin and, where the
            dataset has none, their tokenizer are passed on.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        tokenizer_file: Path | None,
        after: Callable[[], None],
        before: Weights | None = None,
    ) -> None:
        self._folder, self._config = folder, config
        self._origin = before.header.origin if before else None
        tokenizer_file = tokenizer_file or (before.tokenizer_file if before else None)
        self._tokenizer = tokenizer_file.read_bytes() if tokenizer_file else None
        self._after = after
        self._is_there = folder.is_dir()
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Wait for the save under way; raises what it failed with."""
        self._worker.shutdown(wait=True)
        self.wait()

    def save(self, model: GPT, optimizer: MultiSteps, meta: CheckpointMeta) -> None:
        """Start saving; returns when the arrays may change. An earlier save is waited for.

        Raises:
            RunFailure: it cannot be written, or the earlier one could not.
        """
        self.wait()
        vocab_size = self._config.model.vocab_size
        arrays, moments = named_arrays(model, vocab_size), named_arrays(optimizer, vocab_size)
        needed_bytes = self._needed_bytes(arrays, moments)
        with self._writing_of(meta.global_step, needed_bytes):
            begin = functools.partial(self._begin, meta.global_step, needed_bytes)
            unfinished = self._folder / hosts.said_by_first(begin)
            with _removed_on_failure(unfinished):
                weights = {name: hosts.whole(array) for name, array in arrays.items()}
                optimizer_saved = _save_behind(unfinished / checkpoint.OPTIMIZER_FOLDER, moments)
        self._writing = (
            self._worker.submit(
                self._finish, unfinished, optimizer_saved, weights, meta, needed_bytes
            )
            if hosts.is_first()
            else self._worker.submit(optimizer_saved.result)
        )

    def raise_failure(self) -> None:
        """Raise what a save behind the loop failed with, if one did."""
        if self._writing is not None and self._writing.done():
            self._writing.result()

    def wait(self) -> None:
        """Wait for the save under way; raises what it failed with."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _needed_bytes(self, *arrays: dict[str, jax.Array]) -> int:
        """How much room a checkpoint takes. Orbax compresses its part, by little."""
        held = sum(array.nbytes for part in arrays for array in part.values())
        return held + len(self._tokenizer or b"") + _BYTES_BESIDE_ARRAYS

    def _writing_of(self, step: int, needed_bytes: int) -> contextlib.AbstractContextManager[None]:
        """Whatever a save fails with ends the run with a line."""
        what = f"the checkpoint of step {step}"
        return disk.writing(self._folder, what, needed_bytes, failures=Exception)

    def _begin(self, step: int, needed_bytes: int) -> str:
        """Make the folder of a checkpoint of this step; returns its name."""
        if self._is_there and not self._folder.is_dir():
            log.warning(
                "%s: was removed with all that was saved; made anew for the checkpoint of step %d",
                self._folder,
                step,
            )
        self._folder.mkdir(exist_ok=True)
        self._is_there = True
        sync_to_disk(self._folder.parent)
        disk.refuse_without_room(self._folder, f"the checkpoint of step {step}", needed_bytes)
        name = UNFINISHED + checkpoint_name(self._folder, step)
        (self._folder / name).mkdir()
        return name

    def _finish(
        self,
        unfinished: Path,
        optimizer_saved: Any,
        weights: dict[str, Any],
        meta: CheckpointMeta,
        needed_bytes: int,
    ) -> None:
        with self._writing_of(meta.global_step, needed_bytes):
            with _removed_on_failure(unfinished):
                self._fill(unfinished, optimizer_saved, weights, meta)
            unfinished.rename(self._folder / unfinished.name.removeprefix(UNFINISHED))
            sync_to_disk(self._folder)
        with disk.writing(self._folder, f"the names {BEST} and {LATEST}"):
            relink(self._folder)
            prune(self._folder, self._config.train.keep_checkpoints)
        self._after()

    def _fill(
        self, unfinished: Path, optimizer_saved: Any, weights: dict[str, Any], meta: CheckpointMeta
    ) -> None:
        header = WeightsHeader(*self._config, meta.tokenizer, self._origin)
        limit = self._config.train.max_weights_file_bytes
        try:
            needed = weights_file.write_weights(unfinished, weights, header, limit)
            if self._tokenizer is not None:
                (unfinished / checkpoint.TOKENIZER_FILE).write_bytes(self._tokenizer)
        finally:
            optimizer_saved.result()  # Orbax's threads, left alone, would keep the process for long
        checkpoint.seal(unfinished, meta, needed)


@contextlib.contextmanager
def _removed_on_failure(unfinished: Path) -> Iterator[None]:
    """Make room again where a checkpoint is not finished, unless other processes still write it."""
    try:
        yield
    except Exception:
        if not hosts.is_one_of_several():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _save_behind(folder: Path, arrays: dict[str, jax.Array]) -> Any:
    """Begin to save arrays with Orbax; returns when they may change, what has the `result()`."""
    from orbax.checkpoint import v1 as ocp

    context = ocp.Context()
    context.array.saving.enable_write_sharding_file = False
    # Else a program of its own cuts each replica's slice out of each array, while training waits.
    context.array.saving.use_replica_parallel = False
    # Where a folder cannot be made behind the loop, threads wait for it for five minutes.
    context.asynchronous.create_directories_asynchronously = False
    with context:
        return ocp.save_async(folder.resolve(), arrays)


def checkpoint_name(folder: Path, step: int) -> str:
    """The folder name of a checkpoint of this step, saved now: after all of the same step that are
    there, also where the clock was set back, or two are saved within a second."""
    names = [path.name.removeprefix(UNFINISHED) for path in folder.glob(f"*-step-{step:06d}")]
    stamps = [time_stamp(), *(_stamp_after(name.partition("-")[0]) for name in names)]
    return f"{max(stamps)}-step-{step:06d}"


def _stamp_after(stamp: str) -> str:
    """A second later than a time stamp; nothing where it is none."""
    try:
        then = datetime.datetime.strptime(stamp, _STAMP)
    except ValueError:
        return ""
    return f"{then + datetime.timedelta(seconds=1):{_STAMP}}"


def time_stamp() -> str:
    """Now in UTC, as the names of checkpoints begin."""
    return f"{utc_now():{_STAMP}}"


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def restore(
    saved: Checkpoint, config: RunConfig, total_steps: int, mesh: Mesh
) -> tuple[GPT, MultiSteps]:
    """The model and optimizer of a checkpoint, each array straight onto its devices.

    The checkpoint's files are taken to be whole: see `Checkpoint.damage`.
    """
    from orbax.checkpoint import v1 as ocp

    abstract = AbstractState(config, total_steps, mesh)
    weights = _place(saved.weights, abstract, abstract.trained)
    context = ocp.Context()
    context.array.loading.enable_padding_and_truncation = abstract.is_padded
    with context:
        folder = saved.folder.resolve() / checkpoint.OPTIMIZER_FOLDER
        optimizer = ocp.load(folder, abstract.optimizer)
    return abstract.fill(weights, optimizer)


def load_model(path: Path | str) -> GPT:
    """The model of a run folder (its best checkpoint, else what was imported), a checkpoint or a
    `model.safetensors`, also where that is in shards.

    Returns:
        A `GPT` on the first device, `model(tokens_BS) -> logits_BSV` in float32, its parameters
        in the types they were saved in, LoRA's merged.

    Raises:
        UserError: nothing there that can be loaded, or it is damaged.
    """
    weights = MergedWeights(find_whole_weights(path))
    abstract = AbstractModel(weights.header.model)
    return abstract.fill(_place(weights, abstract))


def starting_weights(
    weights: Weights | None, config: RunConfig, total_steps: int, mesh: Mesh
) -> dict[str, jax.Array]:
    """Saved parameters for a run to start from, none where there are none: those it trains in
    float32, with LoRA the others in the types they were saved in."""
    if weights is None:
        return {}
    abstract = AbstractState(config, total_steps, mesh)
    return _place(weights, abstract, abstract.trained, but=LOW_RANK_NAMES)


def load_tokenizer(path: Path | str, datasets_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of a model: the file beside its weights, else that of its dataset, else the
    hub's. `path` as for `load_model`.

    Raises:
        UserError: it is nowhere to be had, or damaged.
    """
    weights = find_weights(path)
    beside = weights.with_name(checkpoint.TOKENIZER_FILE)
    if is_file(beside):
        refuse_damaged(weights, only=checkpoint.TOKENIZER_FILE)
        return tokenization.load_tokenizer(beside)
    name = Weights(weights).header.tokenizer
    if not name:
        raise UserError(
            f"{weights}: was imported without a tokenizer; put its tokenizer.json beside it"
        )
    folder = folder_of(name, find_datasets_dir(datasets_dir))
    return tokenization.load_tokenizer(folder if is_folder(folder) else name)


def find_whole_weights(path: Path | str) -> Path:
    """As `find_weights`; raises UserError where they, or the tokenizer with them, are damaged."""
    weights = find_weights(path)
    refuse_damaged(weights)
    return weights


def find_weights(path: Path | str) -> Path:
    """The `model.safetensors`, or the index where it is in shards, that a run folder, a checkpoint
    or a path to one stands for."""
    path = RUNS / path if is_folder(RUNS / path) and not is_there(path) else Path(path)
    link = path / "checkpoints" / BEST
    if path.name in (BEST, LATEST) or path.parent.name in (BEST, LATEST):
        link = path if path.name in (BEST, LATEST) else path.parent
        path = _follow(path)
    for candidate in (
        path,
        path / WEIGHTS_FILE,
        _follow(path / "checkpoints" / BEST) / WEIGHTS_FILE,
    ):
        if is_file(weights := file_or_index(candidate)):
            return weights
    if os.path.lexists(link):
        raise _leads_nowhere(link)
    imported = file_or_index(path / "checkpoints" / IMPORTED / WEIGHTS_FILE)
    if is_file(imported):
        return imported
    if is_folder(path):
        raise UserError(f"{path}: no checkpoint there yet; train it first: uv run train.py {path}")
    raise UserError(f"{path}: no such run, checkpoint or model.safetensors; {known_runs()}")


def _place(
    weights: Weights,
    abstract: AbstractModel | AbstractState,
    cast: Collection[str] = (),
    but: tuple[str, ...] = (),
) -> dict[str, jax.Array]:
    """Each parameter onto its devices, one after the other; those named in `cast` in the type that
    they have in the abstract, the others in the one they were saved in; without those whose name
    ends as one in `but`."""
    names = [name for name in abstract.weights if not name.endswith(but)]
    weights.refuse_other_than({name: abstract.shapes[name] for name in names})

    def place(name: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        array = weights.array(name)
        array = array.astype(leaf.dtype, copy=False) if name in cast else array
        padding = [(0, size - has) for size, has in zip(leaf.shape, array.shape, strict=True)]
        array = np.pad(array, padding) if leaf.shape != array.shape else array
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda at: array[at])

    return {name: place(name, abstract.weights[name]) for name in names}


def _point(link: Path, target: str) -> None:
    """Make `link` a relative symlink to `target`, or a text file naming it, in one step."""
    new = link.with_name(UNFINISHED + link.name)
    new.unlink(missing_ok=True)
    try:
        new.symlink_to(target, target_is_directory=True)
    except OSError:
        new.write_text(target + "\n")
    if link.is_dir() and not link.is_symlink():  # a copy that followed links made it a folder
        aside = link.parent.parent / "aside"
        aside.mkdir(exist_ok=True)
        link.rename(aside / f"{time_stamp()}-{link.name}")
    new.replace(link)


def _follow(path: Path) -> Path:
    """A path below `best` or `latest` where those are text files instead of symlinks."""
    for pointer in (path, *path.parents):
        if pointer.name in (BEST, LATEST) and is_file(pointer):
            name = pointer.read_bytes().decode(errors="replace").strip()
            if not is_plain_name(name):
                raise _leads_nowhere(pointer)
            return pointer.parent / name / path.relative_to(pointer)
    return path


def _leads_nowhere(link: Path) -> UserError:
    return UserError(
        f"{link}: leads to no checkpoint; name one of those in {link.parent}, or set it right:"
        " uv run train.py with the run"
    )

"""The checkpoints of a run: linked, pruned, found, restored.

With `saver.py` the only writer under `checkpoints/`. A checkpoint is written under a name with a
leading dot and renamed when it is whole, so a crash leaves either all of it or nothing that looks
like one.
"""

import contextlib
import datetime
import logging
import os
import shutil
from collections.abc import Collection
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing import manifest
from rungs.checkpointing.manifest import Checkpoint, read_checkpoint, refuse_damaged
from rungs.checkpointing.merged_weights import MergedWeights
from rungs.checkpointing.weights_file import Weights
from rungs.checkpointing.weights_index import WEIGHTS_FILE, file_or_index
from rungs.common.errors import UserError
from rungs.common.paths import is_file, is_folder, is_plain_name, is_there
from rungs.config.run_config import RunConfig
from rungs.data import tokenizer_files
from rungs.data.catalog import find_datasets_dir, folder_of
from rungs.data.tokenizer import TOKENIZER_FILE, Tokenizer
from rungs.model.gpt import GPT
from rungs.model.lora import LOW_RANK_NAMES
from rungs.optim.optimizer import MultiSteps
from rungs.run.folder import RUNS, known_runs
from rungs.step.state import AbstractModel, AbstractState

BEST, LATEST, IMPORTED = "best", "latest", "imported"
CHECKPOINT_NAMES = "[0-9]*-step-*"
UNFINISHED = "."
"""Prefix of a checkpoint being written or deleted, and of a link being made."""

_STAMP = "%Y%m%dZ%H%M%S"
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
        folder = saved.folder.resolve() / manifest.OPTIMIZER_FOLDER
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
    beside = weights.with_name(TOKENIZER_FILE)
    if is_file(beside):
        refuse_damaged(weights, only=TOKENIZER_FILE)
        return tokenizer_files.load_tokenizer(beside)
    name = Weights(weights).header.tokenizer
    if not name:
        raise UserError(
            f"{weights}: was imported without a tokenizer; put its tokenizer.json beside it"
        )
    folder = folder_of(name, find_datasets_dir(datasets_dir))
    return tokenizer_files.load_tokenizer(folder if is_folder(folder) else name)


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


def link_target(link: Path) -> str | None:
    """Return the name of the checkpoint that `best` or `latest` leads to, None if there is none."""
    target = _follow(link)
    return target.resolve().name if is_folder(target) else None


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

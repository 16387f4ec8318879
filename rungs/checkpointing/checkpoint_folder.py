"""A run's `checkpoints/` folder: names, validity, the best one, the links `best` and `latest`; the
old ones that are deleted; the list that `checkpointing.py` prints, and the mean of the weights of
several. A checkpoint that is being written has a leading dot.

After each save the newest `keep_checkpoints`, the best one for each set of validation data and that
of step 0 remain. More are deleted if the next one would not fit on the disk. Only folders named
like checkpoints are; users' own copies beside them stay."""

import contextlib
import datetime
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rungs.checkpointing import weights_file
from rungs.checkpointing.manifest import (
    CHECKSUMS_FILE,
    EMA_FOLDER,
    META_FILE,
    OPTIMIZER_FOLDER,
    Checkpoint,
    CheckpointError,
    changed_files,
    read_checkpoint,
    read_checksums,
    refuse_damaged,
    write_checksums,
)
from rungs.checkpointing.weights_file import BASE, WEIGHTS_FILE, file_or_index
from rungs.common import disk
from rungs.common.errors import UserError
from rungs.common.shown_text import command_line, quoted
from rungs.run.folder import RUNS, RunFolder, is_checkpoint_name, known_runs

IMPORTED = weights_file.IMPORTED
"""Name of the folder that `pretrained.py import` fills."""
AVERAGE = "average-"
"""Prefix of the folders that `checkpointing.py --average` fills."""
UNFINISHED = "."
"""Prefix of checkpoints that are being written or deleted."""
LINKS = BEST, LATEST = "best", "latest"

log = logging.getLogger("rungs")


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the paths named like checkpoints, sorted."""
    names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [folder / name for name in sorted(filter(is_checkpoint_name, names))]


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints with a usable `meta.json`, ordered by step."""
    return _read_all(folder)[0]


def unusable_checkpoints(folder: Path) -> dict[Path, CheckpointError]:
    """Return the checkpoint folders without a usable `meta.json`, and why."""
    return _read_all(folder)[1]


def _read_all(folder: Path) -> tuple[list[Checkpoint], dict[Path, CheckpointError]]:
    usable, unusable = list[Checkpoint](), dict[Path, CheckpointError]()
    for path in checkpoint_folders(folder):
        try:
            usable.append(read_checkpoint(path))
        except CheckpointError as error:
            unusable[path] = error
    return sorted(usable, key=lambda c: c.order), unusable


def order_by_name(name: str) -> tuple[int, str]:
    """Return the sort key of a checkpoint, `Checkpoint.order`, from its folder's name."""
    step = name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1, name


def newest_valid(folder: Path) -> Checkpoint | None:
    """Return the checkpoint with the highest step whose files all match their checksums. Logs a
    warning for each one skipped."""
    checkpoints, unusable = _read_all(folder)
    for error in unusable.values():
        log.warning("%s; not used", error)
    for candidate in reversed(checkpoints):
        damage = candidate.damage()
        if not damage:
            return candidate
        log.warning("%s: damaged (%s); not used", candidate.folder, ", ".join(damage))
    return None


def best_of(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the lowest selection loss, the earliest of equals, among those
    with the validation data of the latest one. `checkpoints` must be ordered by step."""
    rated = [c for c in checkpoints if c.meta.selection_loss is not None]
    return best_by_validation_data(rated)[rated[-1].meta.validation_data] if rated else None


def best_by_validation_data(checkpoints: list[Checkpoint]) -> dict[str | None, Checkpoint]:
    """Return the best checkpoint for each set of validation data that losses were measured on."""
    ranked = sorted(
        (loss, c.order, c) for c in checkpoints if (loss := c.meta.selection_loss) is not None
    )
    return {c.meta.validation_data: c for *_, c in reversed(ranked)}


def checkpoint_name(folder: Path, step: int) -> str:
    """Return a new checkpoint's folder name. Waits if the same step was saved in this second."""
    while (folder / (name := f"{time_stamp()}-step-{step:06d}")).exists():
        time.sleep(0.1)
    return name


def time_stamp() -> str:
    """Return the current UTC time in the format that begins checkpoint names."""
    return f"{utc_now():%Y%m%dZ%H%M%S}"


def utc_now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


def update_links(folder: Path) -> None:
    """Point `best` and `latest` at the current best and latest checkpoint."""
    checkpoints = list_checkpoints(folder)
    latest = checkpoints[-1] if checkpoints else None
    for name, target in ((BEST, best_of(checkpoints)), (LATEST, latest)):
        if target is not None:
            _point(folder / name, target.folder.name)


def _point(link: Path, target: str) -> None:
    if link.is_dir() and not link.is_symlink():  # the run was copied with links followed
        aside = link.parent.parent / "aside"
        aside.mkdir(exist_ok=True)
        link.rename(aside / f"{time_stamp()}-{link.name}")
    new = link.with_name(f".{link.name}")
    new.unlink(missing_ok=True)
    new.symlink_to(target)
    new.replace(link)


def most_needed(keep: int) -> int | None:
    """Return how many checkpoints are on the disk at once, None if all are kept: the one being
    written, that of step 0, the best, and the newest `keep` − 1 others, but at least one."""
    return None if keep == -1 else max(keep, 2) + 2


def delete_old(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` checkpoints, the best ones and that of step 0; none if
    `keep` is -1."""
    _delete(superfluous(list_checkpoints(folder), keep))


def superfluous(checkpoints: list[Checkpoint], keep: int) -> list[Checkpoint]:
    """Return the checkpoints to delete if the newest `keep`, the best ones and that of step 0,
    which shows how little an untrained model knows, stay. `checkpoints` must be ordered by step; a
    `keep` of -1 keeps all."""
    return [old for old in _older(checkpoints, keep) if old.step > 0]


def _older(checkpoints: list[Checkpoint], keep: int) -> list[Checkpoint]:
    """Return all but the newest `keep` checkpoints and the best ones."""
    best = best_by_validation_data(checkpoints).values()
    older = checkpoints[:-keep] if keep > 0 else []
    return [old for old in older if old not in best]


def make_room(folder: Path, keep: int, needed_bytes: int) -> None:
    """Delete old checkpoints if the next one would not fit on the disk: all but the newest `keep` -
    1 (at least one), then as many more as needed, oldest first, if that is enough, also that of
    step 0. The best ones and the newest valid one are never deleted."""
    if keep == -1 or disk.free_bytes(folder) >= needed_bytes:
        return
    checkpoints = list_checkpoints(folder)
    newest = newest_valid(folder)
    due = [one for one in superfluous(checkpoints, max(keep - 1, 1)) if one != newest]
    kept = [one for one in _older(checkpoints, 1) if one not in (*due, newest)]
    _delete_for_room(folder, due)
    missing = needed_bytes - disk.free_bytes(folder)
    sizes = {one.folder: disk.folder_bytes(one.folder) for one in kept}
    if missing <= sum(sizes.values()):
        while missing > 0:
            oldest = kept.pop(0)
            _delete_for_room(folder, [oldest])
            missing -= sizes[oldest.folder]


def _delete_for_room(folder: Path, old: list[Checkpoint]) -> None:
    if old:
        names = ", ".join(checkpoint.folder.name for checkpoint in old)
        log.warning("%s: too little space for the next checkpoint; deleting %s", folder, names)
    _delete(old)


def _delete(checkpoints: Iterable[Checkpoint]) -> None:
    for checkpoint in checkpoints:
        with contextlib.suppress(FileNotFoundError):  # already deleted by the user
            disk.discard(checkpoint.folder)


def clean_up(folder: Path) -> None:
    """Delete what a crash left half-written or half-deleted, and update the links."""
    for path in folder.glob(UNFINISHED + "*"):
        if is_checkpoint_name(path.name.removeprefix(UNFINISHED).removesuffix(disk.DISCARDED)):
            disk.remove(path)
    update_links(folder)


class ListedCheckpoint(NamedTuple):
    """One checkpoint folder, valid or not."""

    name: str
    step: int | None
    """The last step taken; None for imported weights or if meta.json cannot be read."""
    train_loss: float | None
    validation_loss: float | None
    pass_at_1: float | None
    """Share of right completions, in reinforcement learning."""
    bytes: int
    created: str
    """UTC, ISO 8601; empty if unknown."""
    links: list[str]
    """Which of `best` and `latest` point here."""
    damage: list[str]
    """Names of files that are missing or changed."""
    has_checksums: bool


def list_run(run: RunFolder, *, verify: bool) -> list[ListedCheckpoint]:
    """Return a run's checkpoints in the order they were saved; imported weights come first.
    `verify` hashes every file; otherwise only missing files and a damaged meta.json are found."""
    folder = run.checkpoints
    targets = {name: (folder / name).resolve().name for name in LINKS}

    def links(path: Path) -> list[str]:
        return [name for name, target in targets.items() if target == path.name]

    models = run.imported, *sorted([*folder.glob(f"{AVERAGE}[0-9]*"), *folder.glob(f"{BASE}*")])
    listed = [_without_training(path, verify) for path in models if path.is_dir()]
    listed += [_listed(path, links(path), verify) for path in checkpoint_folders(folder)]
    # a running training may have deleted some
    return [checkpoint for checkpoint in listed if (folder / checkpoint.name).is_dir()]


def _listed(folder: Path, links: list[str], verify: bool) -> ListedCheckpoint:
    try:
        checkpoint = read_checkpoint(folder)
    except CheckpointError:
        return _without_manifest(folder, links, [META_FILE])
    meta, damage = checkpoint.meta, checkpoint.damage() if verify else checkpoint.missing()
    if meta.train.get("lora") and not damage:
        damage = _lost_base(checkpoint, verify)
    quality = meta.train_loss, meta.validation_loss, meta.pass_at_1
    size = disk.folder_bytes(folder)
    return ListedCheckpoint(
        folder.name, meta.global_step, *quality, size, meta.created, links, damage, True
    )


def _lost_base(checkpoint: Checkpoint, verify: bool) -> list[str]:
    """Return why a checkpoint's adapter has no base, an empty list if it has."""
    try:
        weights = checkpoint.weights
        if verify:
            weights.refuse_changed_base()
    except UserError as error:
        return [str(error)]
    return []


def _without_training(folder: Path, verify: bool) -> ListedCheckpoint:
    if not (folder / CHECKSUMS_FILE).is_file():
        return _without_manifest(folder, [], [])
    missing = [name for name in read_checksums(folder) if not (folder / name).is_file()]
    damage = changed_files(folder) if verify else missing
    return _without_manifest(folder, [], damage)._replace(has_checksums=True)


def _without_manifest(folder: Path, links: list[str], damage: list[str]) -> ListedCheckpoint:
    size = disk.folder_bytes(folder)
    return ListedCheckpoint(folder.name, None, None, None, None, size, "", links, damage, False)


def average_checkpoints(run: RunFolder, count: int) -> tuple[Path, list[int]]:
    """Write the mean of the weights of the last `count` checkpoints as a model of its own, and
    return its folder and the steps. Raises UserError if there are fewer, or one is damaged."""
    checkpoints, unusable = _read_all(run.checkpoints)
    by_step = {checkpoint.step: checkpoint for checkpoint in checkpoints}
    last = list(by_step.values())[-count:]
    if len(last) < count:
        raise UserError(
            f"--average {count}: {run.path} has {len(last)} checkpoints; keep more with"
            " keep_checkpoints"
        )
    for path, error in unusable.items():
        if order_by_name(path.name) > last[0].order:
            raise error
    for checkpoint in last:
        if damage := checkpoint.damage(_is_of_model):
            raise UserError(f"{checkpoint.folder}: damaged ({', '.join(damage)})")
        checkpoint.weights.refuse_changed_base()
    folder = run.checkpoints / f"{AVERAGE}{count}"
    with disk.lock_folder(folder), disk.atomic_folder(folder, replace=True) as new:
        _write_mean(new, last)
    return folder, [checkpoint.step for checkpoint in last]


def _write_mean(folder: Path, checkpoints: list[Checkpoint]) -> None:
    last, sources = checkpoints[-1], [checkpoint.weights for checkpoint in checkpoints]
    shapes = {name: sources[-1].shape(name) for name in sources[-1].names()}
    for source in sources:
        source.check_tensors(shapes)
    means: dict[str, np.ndarray] = {}
    for name in sorted(shapes):
        total = np.zeros(shapes[name], np.float64)
        for source in sources:
            total += source.array(name)
        mean = (total / len(sources)).astype(np.float32)
        means[name] = weights_file.cast(mean, sources[-1].array(name).dtype.name)
    limit = last.meta.run_config().train.max_weights_file_bytes
    weights_file.write_weights(folder, means, sources[-1].header._replace(base=None), limit)
    for name in filter(_is_of_model, last.meta.checksums):
        if not name.startswith(Path(WEIGHTS_FILE).stem):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes((last.folder / name).read_bytes())
    write_checksums(folder)


def _is_of_model(name: str) -> bool:
    return name.partition("/")[0] not in (OPTIMIZER_FOLDER, EMA_FOLDER)


def find_valid_weights(path: Path | str) -> Path:
    """Like `find_weights`, but raise UserError if the weights or tokenizer are damaged."""
    weights = find_weights(path)
    refuse_damaged(weights)
    return weights


def find_averaged_weights(path: Path | str) -> Path:
    """Like `find_weights`, but return the averaged weights that were saved beside those."""
    weights = find_weights(path)
    averaged = file_or_index(weights.parent / EMA_FOLDER / WEIGHTS_FILE)
    if not averaged.is_file():
        raise UserError(
            f"--weights ema: {weights.parent} has no averaged weights, which are saved with"
            " ema_decay in train.json; leave it out"
        )
    return averaged


def find_weights(path: Path | str) -> Path:
    """Return the path of the `model.safetensors`, or its shard index, that a path refers to: a run
    folder (its best checkpoint, or imported weights if it has none), a checkpoint folder, with or
    without the time in its name, or the file itself. Raises UserError if there is none."""
    path = Path(path)
    if not path.exists() and (RUNS / path).is_dir():
        path = RUNS / path
    if not path.exists() and path.name.startswith("step-"):
        saved = checkpoint_folders(path.parent)
        path = max((one for one in saved if one.name.endswith(f"-{path.name}")), default=path)
    checkpoints = path / "checkpoints"
    best, imported = checkpoints / BEST, checkpoints / IMPORTED
    chosen = best if os.path.lexists(best) else imported
    for candidate in (path, path / WEIGHTS_FILE, chosen / WEIGHTS_FILE):
        weights = file_or_index(candidate)
        if weights.is_file():
            return weights
    if path.is_dir():
        raise UserError(
            f"{path}: no checkpoint there yet; train it first: {command_line('train')}"
            f" {quoted(path)}"
        )
    raise UserError(
        f"{path}: no such run, checkpoint or model.safetensors; {known_runs(str(path))}"
    )

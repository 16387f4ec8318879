"""A run's `checkpoints/` folder: names, validity, the best one, the links `best` and `latest`, and
the list that `checkpointing.py` prints. A checkpoint that is being written has a leading dot."""

import datetime
import logging
import os
from pathlib import Path
from typing import NamedTuple

from rungs.checkpointing.manifest import (
    CHECKSUMS_FILE,
    EMA_FOLDER,
    META_FILE,
    Checkpoint,
    CheckpointError,
    changed_files,
    read_checkpoint,
    read_checksums,
    refuse_damaged,
)
from rungs.checkpointing.weights_file import WEIGHTS_FILE, file_or_index
from rungs.common import disk, paths
from rungs.common.errors import UserError
from rungs.common.shown_text import quoted
from rungs.config.run_config import MODEL_FILE
from rungs.run.folder import RUNS, RunFolder, is_checkpoint_name, known_runs

IMPORTED = "imported"
"""Name of the folder that `pretrained.py import` fills."""
AVERAGE = "average-"
"""Prefix of the folders that `checkpointing.py --average` fills."""
UNFINISHED = "."
"""Prefix of checkpoints that are being written or deleted."""
LINKS = BEST, LATEST = "best", "latest"

_STAMP = "%Y%m%dZ%H%M%S"
log = logging.getLogger("rungs")


def checkpoint_folders(folder: Path) -> list[Path]:
    """Return the paths named like checkpoints, sorted. Raises UserError if the folder cannot be
    read, where `Path.glob` would find nothing and the run would look new."""
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError as error:
        if error.errno in paths.NO_FILE:
            return []
        raise paths.cannot_be_read(folder, error) from None
    return [folder / name for name in sorted(filter(is_checkpoint_name, names))]


def unfinished_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of checkpoints that are being written or deleted, or that a crash left."""

    def whole(path: Path) -> str:
        return path.name.removeprefix(UNFINISHED).removesuffix(disk.DISCARDED)

    return [path for path in folder.glob(UNFINISHED + "*") if is_checkpoint_name(whole(path))]


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints with a usable `meta.json`, ordered by step."""
    return _read_all(folder)[0]


def unusable_checkpoints(folder: Path) -> dict[Path, CheckpointError]:
    """Return the checkpoint folders without a usable `meta.json`, and why."""
    return _read_all(folder)[1]


def _read_all(folder: Path) -> tuple[list[Checkpoint], dict[Path, CheckpointError]]:
    found, unusable = list[Checkpoint](), dict[Path, CheckpointError]()
    for path in checkpoint_folders(folder):
        try:
            found.append(read_checkpoint(path))
        except CheckpointError as error:
            unusable[path] = error
    return sorted(found, key=lambda c: c.order), unusable


def order_by_name(name: str) -> tuple[int, str]:
    """Return the sort key of a checkpoint, `Checkpoint.order`, from its folder's name."""
    step = name.rpartition("-")[2]
    return int(step) if step.isdecimal() else -1, name


def newest_valid(folder: Path) -> Checkpoint | None:
    """Return the checkpoint with the highest step whose files all match their checksums. Logs a
    warning for each one skipped. Raises UserError if files cannot be read right now."""
    for path, error in unusable_checkpoints(folder).items():
        is_damaged = error.state == "damaged"
        log.warning("%s; not used", f"{path}: damaged (meta.json)" if is_damaged else error)
    for candidate in reversed(list_checkpoints(folder)):
        if not (damage := candidate.damage()):
            if extra := candidate.extra_files():
                log.warning("%s: was saved without %s; ignored", candidate.folder, ", ".join(extra))
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
    """Return a new checkpoint's folder name. It sorts after all checkpoints of the same step, even
    if the clock was set back or two are saved within a second."""
    names = [path.name.removeprefix(UNFINISHED) for path in folder.glob(f"*-step-{step:06d}")]
    stamps = [time_stamp(), *(_stamp_after(name.partition("-")[0]) for name in names)]
    return f"{max(stamps)}-step-{step:06d}"


def _stamp_after(stamp: str) -> str:
    """Return the time stamp one second later; an empty string if `stamp` is not a time stamp."""
    try:
        then = datetime.datetime.strptime(stamp, _STAMP)
    except ValueError:
        return ""
    return f"{then + datetime.timedelta(seconds=1):{_STAMP}}"


def time_stamp() -> str:
    """Return the current UTC time in the format that begins checkpoint names."""
    return f"{utc_now():{_STAMP}}"


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
        disk.move(link, aside / f"{time_stamp()}-{link.name}")
    new = link.with_name(f".{link.name}")
    disk.remove(new)
    new.symlink_to(target)
    new.replace(link)


def link_target(link: Path) -> str | None:
    """Return the name of the checkpoint that a link points to, None if there is none."""
    try:
        target = follow_link(link)
    except UserError:
        return None
    return target.resolve().name if paths.is_folder(target) else None


def follow_link(path: Path) -> Path:
    """Return `path` with `best` or `latest` resolved, if that is a text file instead of a link.
    Raises UserError if one of a run leads to anything but a name in its own folder."""
    for pointer in (path, *path.parents):
        if pointer.name not in LINKS:
            continue
        if paths.is_link(pointer):
            run = pointer.absolute().parents[1]
            if paths.is_file(run / MODEL_FILE) and not _leads_beside(pointer):
                raise broken_link(pointer)
        elif paths.is_file(pointer):
            name = paths.read_bytes(pointer).decode(errors="replace").strip()
            if not paths.is_plain_name(name):
                raise broken_link(pointer)
            return pointer.parent / name / path.relative_to(pointer)
    return path


def _leads_beside(link: Path) -> bool:
    target = link.parent / link.readlink()
    try:
        return target.name not in LINKS and target.parent.samefile(link.parent)
    except OSError:
        return False


def broken_link(link: Path) -> UserError:
    return UserError(
        f"{link}: does not point to a checkpoint; choose one in {link.parent}, or repair the link"
        f" by starting the run: uv run train.py {quoted(link.parent.parent)}"
    )


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
    """Names of files that are missing or changed, or were added and would be read."""
    has_checksums: bool
    problem: str = ""
    """Why an undamaged checkpoint cannot be used: "other version" or "unreadable"."""


def list_run(run: RunFolder, *, verify: bool) -> list[ListedCheckpoint]:
    """Return a run's checkpoints in the order they were saved; imported weights come first.
    `verify` hashes every file; otherwise only missing files and a damaged meta.json are found."""
    folder = run.checkpoints
    targets = {name: link_target(folder / name) for name in LINKS}

    def links(path: Path) -> list[str]:
        return [name for name, target in targets.items() if target == path.name]

    paths.refuse_unsearchable(run.checkpoints)
    models = run.imported, *sorted(folder.glob(f"{AVERAGE}[0-9]*"))
    listed = [_without_training(path, verify) for path in models if paths.is_folder(path)]
    listed += [_listed(path, links(path), verify) for path in checkpoint_folders(folder)]
    # a running training may have deleted some
    return [checkpoint for checkpoint in listed if (folder / checkpoint.name).is_dir()]


def _listed(folder: Path, links: list[str], verify: bool) -> ListedCheckpoint:
    try:
        checkpoint = read_checkpoint(folder)
    except CheckpointError as error:
        if error.state == "damaged":
            return _without_manifest(folder, links, [META_FILE])
        return _without_manifest(folder, links, [])._replace(problem=error.state)
    meta, damage, problem = checkpoint.meta, list[str](), ""
    try:
        damage = checkpoint.damage() if verify else checkpoint.missing()
    except UserError:
        problem = "unreadable"
    try:
        pass_at_1 = meta.pass_at_1
    except UserError:  # of another version
        pass_at_1 = None
    quality = meta.train_loss, meta.validation_loss, pass_at_1
    size = disk.folder_bytes(folder)
    return ListedCheckpoint(
        folder.name, meta.global_step, *quality, size, meta.created, links, damage, True, problem
    )


def _without_training(folder: Path, verify: bool) -> ListedCheckpoint:
    if not paths.is_file(folder / CHECKSUMS_FILE):  # an earlier version imported it
        return _without_manifest(folder, [], [])
    missing = [name for name in read_checksums(folder) if not paths.is_file(folder / name)]
    damage = changed_files(folder) if verify else missing
    return _without_manifest(folder, [], damage)._replace(has_checksums=True)


def _without_manifest(folder: Path, links: list[str], damage: list[str]) -> ListedCheckpoint:
    size = disk.folder_bytes(folder)
    return ListedCheckpoint(folder.name, None, None, None, None, size, "", links, damage, False)


def find_valid_weights(path: Path | str) -> Path:
    """Like `find_weights`, but raise UserError if the weights or tokenizer are damaged."""
    weights = find_weights(path)
    refuse_damaged(weights)
    return weights


def find_averaged_weights(path: Path | str) -> Path:
    """Like `find_weights`, but return the averaged weights that were saved beside those."""
    weights = find_weights(path)
    averaged = file_or_index(weights.parent / EMA_FOLDER / WEIGHTS_FILE)
    if not paths.is_file(averaged):
        raise UserError(
            f"--weights ema: {weights.parent} has no averaged weights, which are saved with"
            " ema_decay in train.json; leave it out"
        )
    return averaged


def find_weights(path: Path | str) -> Path:
    """Return the path of the `model.safetensors`, or its shard index, that a path refers to: a run
    folder (its best checkpoint, or imported weights if it has none), a checkpoint folder, or the
    file itself. Raises UserError if there is none."""
    path = RUNS / path if paths.is_folder(RUNS / path) and not paths.is_there(path) else Path(path)
    link = path / "checkpoints" / BEST
    if path.name in LINKS or path.parent.name in LINKS:
        link, path = path if path.name in LINKS else path.parent, follow_link(path)
    for candidate in (
        path,
        path / WEIGHTS_FILE,
        follow_link(path / "checkpoints" / BEST) / WEIGHTS_FILE,
    ):
        if paths.is_file(weights := file_or_index(candidate)):
            return weights
    is_linked = os.path.lexists(link)
    if is_linked and not paths.is_file(file_or_index(follow_link(link) / WEIGHTS_FILE)):
        raise broken_link(link)
    imported = file_or_index(path / "checkpoints" / IMPORTED / WEIGHTS_FILE)
    if paths.is_file(imported):
        return imported
    for folder in (path, path / "checkpoints"):
        paths.refuse_unsearchable(folder)
    if paths.is_folder(path) and not is_linked:
        raise UserError(
            f"{path}: no checkpoint there yet; train it first: uv run train.py {quoted(path)}"
        )
    raise UserError(
        f"{path}: no such run, checkpoint or model.safetensors; {known_runs(str(path))}"
    )

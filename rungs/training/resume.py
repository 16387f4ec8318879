"""Where a start begins: which checkpoint, whether it may go on from it, what is put aside.

Nothing here changes the disk but `put_aside`, which moves and never deletes.
"""

import json
import shutil
from pathlib import Path
from typing import Any

from rungs.checkpointing.checkpoint_folder import (
    CHECKPOINT_GLOB,
    IMPORTED,
    UNFINISHED,
    best_of,
    list_checkpoints,
    newest_valid,
    unreadable_checkpoints,
    utc_now,
)
from rungs.checkpointing.links import BEST, LATEST
from rungs.checkpointing.manifest import META_FILE, Checkpoint, CheckpointMeta
from rungs.common.errors import UserError
from rungs.config import run_config
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig
from rungs.config.train_config import TrainConfig
from rungs.run.folder import RunFolder, StartOptions


def checkpoint_to_resume(run: RunFolder, start: StartOptions) -> Checkpoint | None:
    """The checkpoint that this start goes on from; None to start at step 0.

    Raises:
        UserError: the one asked for is not there or damaged, or none of those there is whole.
    """
    if run.checkpoints.exists() and not run.checkpoints.is_dir():
        raise UserError(f"{run.checkpoints}: must be a folder; move away what is there")
    if start.fresh:
        return None
    if start.rewind_to is None:
        return _newest(run)
    wanted = _named(run, start.rewind_to)
    if damage := wanted.damage():
        raise UserError(f"{wanted.folder}: damaged ({', '.join(damage)}); name another")
    return wanted


def refuse_changes(saved: CheckpointMeta, now: RunConfig, run: RunFolder, extend: bool) -> None:
    """Refuse to go on with a run whose mathematics or order of data would change.

    Raises:
        UserError: a line for each such key, with its old and new value.
    """
    before = saved.run_config()
    allowed = TrainConfig.MAY_CHANGE | _same_in_other_parts(before, now)
    if extend:
        allowed |= _extension(before.train, now.train)
    changes = {
        f"{run.path / MODEL_FILE}: {key}": values
        for key, values in run_config.differences(before.model, now.model).items()
    } | {
        f"{run.path / TRAIN_FILE}: {key}": values
        for key, values in run_config.differences(before.train, now.train).items()
        if key not in allowed
    }
    if changes:
        raise UserError(
            "\n".join(_refusal(place, *values, now.train) for place, values in changes.items())
        )


def put_aside(run: RunFolder, saved: Checkpoint | None) -> Path | None:
    """Move the checkpoints after `saved` (all, where it is None) and those that cannot be read
    into a folder under `aside/`, with a copy of the metrics, log and charts as they stand.

    A crash half-way leaves a run that resumes from the newest checkpoint still in place or, where
    none is, metrics by which the next start sees that there is more to move.

    Returns:
        That folder; None where there was nothing to move.
    """
    later = [
        c.folder
        for c in list_checkpoints(run.checkpoints)
        if saved is None or c.order > saved.order
    ] + unreadable_checkpoints(run.checkpoints)
    records = [path for path in (run.metrics, run.log, *run.charts) if path.exists()]
    if not later and not (saved is None and run.metrics.exists()):
        return None
    if saved is None:
        later = [path for path in run.checkpoints.glob("*") if path.name != IMPORTED]
    aside = _with_copies(run, records)
    for path in sorted(later, reverse=True):
        path.rename(aside / "checkpoints" / path.name)
    if saved is None and run.failed_steps.exists():
        run.failed_steps.rename(aside / run.failed_steps.name)
    for path in reversed(records) if saved is None else ():  # the metrics last: see above
        path.unlink()
    return aside


def _with_copies(run: RunFolder, records: list[Path]) -> Path:
    """A new folder under `aside/` with copies of these files, which appears whole."""
    for unfinished in run.aside.glob(UNFINISHED + "*"):
        shutil.rmtree(unfinished)
    aside = run.aside / f"{utc_now():%Y%m%dZ%H%M%S%f}"
    unfinished = aside.with_name(UNFINISHED + aside.name)
    try:
        (unfinished / "checkpoints").mkdir(parents=True)
        for path in records:
            shutil.copy2(path, unfinished / path.name)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    unfinished.rename(aside)
    return aside


def _newest(run: RunFolder) -> Checkpoint | None:
    newest = newest_valid(run.checkpoints)
    if newest is None and any(run.checkpoints.glob(CHECKPOINT_GLOB)):
        raise UserError(
            f"{run.checkpoints}: none of the checkpoints there is whole; start over with --fresh,"
            " which moves them aside"
        )
    return newest


def _named(run: RunFolder, name: str) -> Checkpoint:
    checkpoints = list_checkpoints(run.checkpoints)
    if not checkpoints:
        raise UserError(f"{run.path}: no checkpoints to go back to")
    if name == LATEST:
        return checkpoints[-1]
    if name == BEST:
        return best_of(checkpoints) or checkpoints[-1]
    alike = [c for c in checkpoints if name and c.folder.name.endswith(name)]
    if len({c.step for c in alike}) == 1:
        return alike[-1]
    for path in unreadable_checkpoints(run.checkpoints):
        if name and path.name.endswith(name):
            raise UserError(f"{path}: damaged ({META_FILE}); name another")
    names = ", ".join([BEST, LATEST, *(c.folder.name for c in checkpoints)])
    raise UserError(f"--from {name}: no such checkpoint in {run.path}; there are {names}")


def _same_in_other_parts(before: RunConfig, now: RunConfig) -> set[str]:
    """The keys that divide a step into microbatches, where its sequences stay the same. With
    experts they do not: the load-balancing loss is one of each microbatch."""
    is_same = before.train.sequences_per_step == now.train.sequences_per_step
    keys = {"microbatch_size", "gradient_accumulation_steps"}
    return keys if is_same and not now.model.n_experts else set()


def _extension(before: TrainConfig, now: TrainConfig) -> set[str]:
    """The keys that `--extend` lets through: those that add steps after the old ones.

    More epochs always do. More tokens do only in one epoch in file order; else they would change
    the order of the steps already taken.
    """
    longer = {"epochs"} if now.epochs > before.epochs else set()
    in_order = before.epochs == now.epochs == 1 and not now.shuffle
    more = now.min_train_tokens == -1 or now.min_train_tokens > before.min_train_tokens > 0
    return longer | ({"min_train_tokens"} if in_order and more else set())


def _refusal(place: str, before: Any, now: Any, train: TrainConfig) -> str:
    key = place.rpartition(" ")[2]
    if key == "epochs" or (key == "min_train_tokens" and not train.shuffle and train.epochs == 1):
        hint = "add --extend to train for longer, or put it back"
    elif key == "min_train_tokens":
        hint = "put it back (a shuffled run, or one of several epochs, is extended by epochs)"
    else:
        hint = "put it back"
    return (
        f"{place}: was {json.dumps(before)} when this run was saved, is now {json.dumps(now)};"
        f" {hint}, start another run with --like, or this one over with --fresh"
    )

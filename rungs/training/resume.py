"""Resuming: the checkpoint to resume from, refused config changes, and what `--fresh` and `--from`
move to `aside/`. Only `move_aside` changes the disk, and it never deletes a checkpoint."""

import filecmp
import json
import os
from pathlib import Path

from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.checkpoint_folder import AVERAGE, BEST, LATEST, LINKS, UNFINISHED
from rungs.checkpointing.manifest import META_FILE, Checkpoint, CheckpointMeta
from rungs.common import disk, shown_text
from rungs.common.errors import UserError
from rungs.config import run_config
from rungs.config.base import may_change
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, AnyRunConfig, RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.tokens.loader import TrainingData
from rungs.optim.precision import resolve_compute_dtype
from rungs.run import layer_record, metrics
from rungs.run.derive import Parent
from rungs.run.folder import RunFolder, StartOptions, is_checkpoint_name
from rungs.run.metrics import StepRecord
from rungs.run.records import Length, read

_KEYS_OF_BATCHES = {"microbatch_size", "gradient_accumulation_steps", "batch_growth"}


def checkpoint_to_resume(run: RunFolder, start: StartOptions) -> Checkpoint | None:
    """Return the checkpoint that this start resumes from, None for step 0. Raises UserError if the
    named checkpoint is missing or damaged, or there are checkpoints but none is valid."""
    if start.fresh:
        return None
    if start.rewind_to is not None:
        return _undamaged(_find_by_name(run, start.rewind_to))
    newest = checkpoint_folder.newest_valid(run.checkpoints)
    if newest:
        newest.weights.refuse_changed_base()
    elif checkpoint_folder.checkpoint_folders(run.checkpoints):
        raise UserError(
            f"{run.checkpoints}: none of the checkpoints is valid; start over with --fresh,"
            " which moves them to aside/"
        )
    return newest


def _undamaged(checkpoint: Checkpoint) -> Checkpoint:
    if damage := checkpoint.damage():
        raise UserError(f"{checkpoint.folder}: damaged ({', '.join(damage)}); choose another")
    checkpoint.weights.refuse_changed_base()
    return checkpoint


def refuse_lost_checkpoints(run: RunFolder, config: AnyRunConfig) -> None:
    """Raise UserError for a run without checkpoints whose metrics tell that it saved one, unless
    `--fresh` is moving them aside: a run never starts over by itself."""
    last = max((step.global_step for step in metrics.stream(run.metrics, StepRecord)), default=-1)
    if last <= config.train.checkpoint_interval:  # the first save may not have ended
        return
    moved = max(run.aside.glob(f"*/{run.metrics.name}"), default=None)
    if moved is None or not filecmp.cmp(moved, run.metrics, shallow=False):
        raise UserError(
            f"{run.checkpoints}: no checkpoint is there, but {run.metrics.name} has step {last:,};"
            " put them back, or start over with --fresh"
        )


def refuse_foreign_checkpoints(run: RunFolder) -> None:
    """Raise UserError if a run without checkpoints of its own has those of another program, or a
    `best` or `latest`, which would be replaced, of anything else."""
    if not run.checkpoints.exists():
        return
    from rungs.huggingface import jax_gpt2

    if found := jax_gpt2.find_checkpoint(run.path):
        old, new = (shown_text.quoted(f"{run.path}{end}") for end in ("", "-imported"))
        raise UserError(
            f"{run.checkpoints}: {found.name} is a checkpoint of {jax_gpt2.MODEL_TYPE}, which stays"
            f" as it is; to go on from its weights: {shown_text.command_line('pretrained')} import"
            f' {old} {new}, and put the {TRAIN_FILE} there, with "start_from": "imported"'
        )
    for link in map(run.checkpoints.joinpath, LINKS):
        is_own = (link / META_FILE).is_file()
        if link.is_symlink():
            is_own = is_checkpoint_name(link.readlink().name)
        if os.path.lexists(link) and not is_own:
            raise UserError(f"{link}: not of this run, which would replace it; move it away")


def refuse_changes(
    saved: CheckpointMeta, now: AnyRunConfig, run: RunFolder, extend: bool
) -> AnyRunConfig:
    """Raise UserError if resuming would change the mathematics or the order of data, with a line
    for each such key, and its old and new value. `extend` allows more tokens, epochs or steps.
    Return the config, with the recorded dtype if compute_dtype is "auto"."""
    before = saved.run_config()
    if before.train_file != now.train_file:
        raise UserError(
            f"{run.path / now.train_file}: the checkpoints here were trained with"
            f" {before.train_file}; move it to another folder, or start over with --fresh"
        )
    train = resolve_compute_dtype(now.train, before.train.compute_dtype)
    now = now._replace(train=train)
    is_branch = now.train.branch_step >= 0 and saved.global_step == now.train.branch_step
    extendable = _extendable_keys(before.train, now.train)
    allowed = may_change(type(now.train)) | _microbatch_keys(before, now)
    if is_branch:
        allowed |= type(now.train).model_fields.keys() - _keys_of_branches(before, now)
    elif extend:
        allowed |= extendable
    when = f"step {saved.global_step}" if is_branch else "this run"
    lines = []
    for file, old_config, new_config in (
        (MODEL_FILE, before.model, now.model),
        (now.train_file, before.train, now.train),
    ):
        for key, (old, new) in run_config.differences(old_config, new_config).items():
            if file != MODEL_FILE and key in allowed:
                continue
            if is_branch:
                advice = (
                    "a branch continues the same model and optimizer; change it back, or start"
                    " another run from the weights alone with start_from"
                )
                if key in _KEYS_OF_BATCHES:
                    advice = "change it back; for a larger batch from there on, set batch_growth"
            else:
                advice = "add --extend to train longer, or " if key in extendable else ""
                advice += (
                    "change it back, start another run with --like, or start this one over with"
                    " --fresh"
                )
            lines.append(
                f"{run.path / file}: {key}: was {json.dumps(old)} when {when} was saved, is now"
                f" {json.dumps(new)}; {advice}"
            )
    if lines:
        raise UserError("\n".join(lines))
    return now


def find_branch_point(run: RunFolder, step: int) -> Parent:
    """Return a step's checkpoint with what a branch needs of `metrics.jsonl` and `layers.npy`, up
    to the step, and of `length.jsonl`. Raises UserError, with the steps that there are, if the
    checkpoint is missing, or damaged."""
    checkpoints = checkpoint_folder.list_checkpoints(run.checkpoints)
    found = [checkpoint for checkpoint in checkpoints if checkpoint.step == step]
    if not found:
        steps = ", ".join(map(str, sorted({checkpoint.step for checkpoint in checkpoints})))
        raise UserError(
            f"--from-step {step}: {run.path} has no checkpoint of that step; there are"
            f" {steps or 'none'} (keep_checkpoints in its {TRAIN_FILE} is how many it keeps)"
        )
    parent = _undamaged(found[-1])
    steps_before = metrics.stream(run.metrics, metrics.StepMetrics)
    lines = (one.as_line() for one in steps_before if one.global_step <= step)
    needed = {run.metrics.name: "".join(lines).encode()}
    if run.length.exists():
        needed[run.length.name] = run.length.read_bytes()
    if layers := layer_record.up_to(run.layers, step):
        needed[run.layers.name] = layers
    lineage = parent.meta.run_config().train.lineage
    warmup_of = lineage.warmup_of if lineage else None
    before = [one.meta for one in checkpoints if one.step <= step and not one.meta.stopped_after]
    lengths = [one.total_steps for one in read(run, Length) or before or [parent.meta]]
    base = parent.weights.base
    folders = (parent.folder, base.path.parent) if base else (parent.folder,)
    return Parent(folders, needed, warmup_of, lengths[-1])


def edit_to_extend(config: RunConfig, data: TrainingData, done: int) -> str:
    """Return the edit of `train.json` that makes a run of `done` steps longer: twice as many
    tokens, at most all, if that is allowed; otherwise another epoch."""
    if data.total_steps == config.train.max_steps:
        return f"set more max_steps, or null, in {TRAIN_FILE}"
    place = f" in {TRAIN_FILE}"
    if config.train.max_minutes is not None:
        if done < data.total_steps:
            return f"set more max_minutes{place}"
        place = f" and more max_minutes{place}"
    steps = min(2 * data.steps_per_epoch, data.available_steps_per_epoch)
    longer = config.train.model_copy(update={"min_train_tokens": config.tokens_before(steps)})
    if steps > data.steps_per_epoch and _extendable_keys(config.train, longer):
        return f"set min_train_tokens to {longer.min_train_tokens}{place}"
    return f"set epochs to {config.train.epochs + 1}{place}"


def move_aside(run: RunFolder, saved: Checkpoint | None) -> Path | None:
    """Move the checkpoints that this start discards into a new folder under `aside/`: damaged ones
    and those after `saved` (all if None). Return the folder, or None if there was nothing to move.
    Metrics, log, charts and sampled texts are copied along. A fresh start also moves failed steps,
    and removes metrics, log, charts and sampled texts from the run.

    After a crash halfway, the run resumes from the newest checkpoint still in place, or without
    one, the metrics tell the next start that there is more to move."""
    usable = checkpoint_folder.list_checkpoints(run.checkpoints)
    discarded = [one.folder for one in usable if saved is None or one.order > saved.order]
    discarded += checkpoint_folder.unusable_checkpoints(run.checkpoints)
    records = run.records
    if not discarded and not (saved is None and run.metrics.exists()):
        return None
    if saved is None:  # all that training saved; the folder may be a link to one with other files
        discarded = [
            path
            for path in run.checkpoints.glob("*")
            if is_checkpoint_name(path.name.removeprefix(UNFINISHED))
            or path.name in LINKS
            or path.name.startswith(AVERAGE)
        ]
    aside = _create_aside(run, records)
    for path in sorted(discarded, reverse=True):
        path.rename(aside / "checkpoints" / path.name)
    if saved is None:
        if run.failed_steps.exists():
            run.failed_steps.rename(aside / run.failed_steps.name)
        for path in reversed(records):  # metrics last, see above
            disk.remove(path)
    return aside


def _create_aside(run: RunFolder, records: list[Path]) -> Path:
    """Create a folder under `aside/` with copies of these files, atomically."""
    for unfinished in run.aside.glob(UNFINISHED + "*"):
        disk.remove(unfinished)
    aside = run.aside / f"{checkpoint_folder.utc_now():%Y%m%dZ%H%M%S%f}"
    unfinished = aside.with_name(UNFINISHED + aside.name)
    unfinished.mkdir(parents=True)
    checkpoints = run.checkpoints.resolve()
    if checkpoints.is_dir() and checkpoints.stat().st_dev != run.path.stat().st_dev:
        place = checkpoints / run.aside.name / aside.name  # as nothing is renamed across disks
        place.mkdir(parents=True)
        (unfinished / "checkpoints").symlink_to(place)
    else:
        (unfinished / "checkpoints").mkdir()
    for path in records:
        disk.copy(path, unfinished / path.name)
    unfinished.rename(aside)
    return aside


def _find_by_name(run: RunFolder, name: str) -> Checkpoint:
    """Return the checkpoint that a link, a folder's name, `step-N` or N names."""
    checkpoints = checkpoint_folder.list_checkpoints(run.checkpoints)
    if not checkpoints:
        refuse_foreign_checkpoints(run)
        raise UserError(f"--from {name}: there are no checkpoints in {run.path}")
    if name == LATEST:
        return checkpoints[-1]
    if name == BEST:
        return checkpoint_folder.best_of(checkpoints) or checkpoints[-1]
    end = f"step-{name:0>6}" if name.isdecimal() else name  # of the folder's name, or all of it
    matches = [
        c
        for c in checkpoints
        if end == c.folder.name or (end.startswith("step-") and c.folder.name.endswith(f"-{end}"))
    ]
    if len({c.step for c in matches}) == 1:
        return matches[-1]
    names = ", ".join([*LINKS, *(c.folder.name for c in checkpoints)])
    raise UserError(f"--from {name}: no such checkpoint in {run.path}; there are {names}")


def _microbatch_keys(before: AnyRunConfig, now: AnyRunConfig) -> set[str]:
    """Return the keys that split a step into microbatches, if changing them keeps its result: it
    has the same sequences, and no experts, whose load-balancing loss is per microbatch."""
    is_same = before.train.sequences_per_step == now.train.sequences_per_step
    keys = {"microbatch_size", "gradient_accumulation_steps"}
    return keys if is_same and not now.model.n_experts else set()


def _keys_of_branches(before: AnyRunConfig, now: AnyRunConfig) -> set[str]:
    """Return the keys of training that a branch can't change: those that its optimizer's state, the
    position in the data or a stored reference depend on."""
    keys = {
        "optimizer",
        "normuon_beta2",
        "group_beta2",
        "momentum_warmup_steps",
        "lora",
        "matmul_dtype",
        "sequence_length",
    }
    if before.train.averaging_decay and not now.train.averaging_decay:
        keys.add("ema_decay")
    if "float16" in (before.train.compute_dtype, now.train.compute_dtype):
        keys.add("compute_dtype")
    begins_to_refer = getattr(now.train, "has_reference", False)
    if not begins_to_refer or getattr(before.train, "has_reference", False):
        keys.add("start_from")
    step = now.train.branch_step + 1
    if before.train.sequences_before(step) != now.train.sequences_before(step):
        keys |= _KEYS_OF_BATCHES
    return keys


def _extendable_keys(before: OptimizationConfig, now: OptimizationConfig) -> set[str]:
    """Return the keys that `--extend` may change: those that only add steps at the end. More epochs
    always do; more tokens only in a single epoch in file order or if epochs differ, else they
    reorder earlier steps."""
    if isinstance(before, ReinforceConfig) and isinstance(now, ReinforceConfig):
        return {"steps"} if now.steps > before.steps else set()
    assert isinstance(before, TrainConfig)
    assert isinstance(now, TrainConfig)
    if now.phases:  # their ends would move
        return set()
    longer = {"epochs"} if now.epochs > before.epochs else set()
    if before.max_minutes and now.max_minutes and now.max_minutes > before.max_minutes:
        longer.add("max_minutes")
    if before.max_steps and (now.max_steps is None or now.max_steps > before.max_steps):
        longer.add("max_steps")
    in_order = before.epochs == now.epochs == 1 and not now.shuffle
    more = now.min_train_tokens == -1 or now.min_train_tokens > before.min_train_tokens > 0
    keeps_order = in_order or now.epochs_differ
    return longer | ({"min_train_tokens"} if keeps_order and more else set())

"""What every start of a run needs, whatever it trains on: the checkpoint to resume from, the
devices, the dtype, a tidy run folder, model and optimizer."""

import contextlib
import dataclasses
import json
import logging
import re
import signal
from collections.abc import Iterator
from functools import partial

from jax.sharding import Mesh

from rungs.checkpointing.checkpoint_folder import clean_up, delete_old
from rungs.checkpointing.load import find_starting_weights, place_starting_weights, restore
from rungs.checkpointing.manifest import (
    Checkpoint,
    CheckpointMeta,
    installed_versions,
    read_checkpoint,
)
from rungs.common import run_log
from rungs.common.errors import UserError
from rungs.common.paths import is_file
from rungs.config.base import AUTO
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import MODEL_FILE, AnyRunConfig, load_any_run
from rungs.config.sharding_config import ShardingConfig
from rungs.model.gpt import GPT
from rungs.model.layer_loop import LayerLoop, layer_loop
from rungs.optim.multi_steps import MultiSteps
from rungs.optim.precision import T, resolve_compute_dtype
from rungs.parallel import jax_setup
from rungs.parallel.devices import create_run_mesh
from rungs.parallel.processes import (
    broadcast_from_first,
    connect,
    is_first_process,
    is_multi_process,
)
from rungs.run import records
from rungs.run.folder import RunFolder, StartOptions
from rungs.step.state import copy_bytes, create_model_and_optimizer
from rungs.tracking import feed
from rungs.training.learner import Start
from rungs.training.resume import checkpoint_to_resume, move_aside, refuse_changes

EXIT_STOPPED_ELSEWHERE = 128 + signal.SIGTERM
"""Exit code if another process of the run received the signal to stop."""

log = logging.getLogger("rungs")


def find_checkpoint(run: RunFolder, start: StartOptions) -> Checkpoint | None:
    """Return the checkpoint to resume from; the first process chooses it for all."""

    def name() -> str:
        found = checkpoint_to_resume(run, start)
        return found.folder.name if found else ""

    chosen = broadcast_from_first(name)
    return read_checkpoint(run.checkpoints / chosen) if chosen else None


def start_of(
    run: RunFolder, config: AnyRunConfig, options: StartOptions, saved: Checkpoint | None
) -> Start:
    """Return a start that resumes from a checkpoint, or begins with step 0 from the weights that
    `start_from` names, or random ones.

    Raises:
        UserError: the config has changed more than it may, or there are no such weights.
    """
    if saved is None:
        return Start(run, config, options, None, find_starting_weights(run, config))
    config = config._replace(train=with_recorded_dtype(config.train, saved.meta))
    refuse_changes(saved.meta, config, run, options.extend)
    return Start(run, config, options, saved, saved.weights)


def refuse_to_restore(saved: CheckpointMeta, run: RunFolder, start: StartOptions) -> None:
    """Refuse a checkpoint of a mirror if the run folder has configs that can't resume from it.

    Args:
        run: the run folder, which may not be there.

    Raises:
        UserError: see `refuse_changes`.
    """
    if start.fresh or not is_file(run.path / MODEL_FILE):
        return
    now = load_any_run(run.path)
    train = with_recorded_dtype(now.train, saved)
    refuse_changes(saved, now._replace(train=train), run, start.extend)


def with_recorded_dtype(train: T, saved: CheckpointMeta) -> T:
    """Set compute_dtype "auto" to the dtype that a checkpoint recorded."""
    return resolve_compute_dtype(train, saved.run_config().train.compute_dtype)


def with_device_choices(start: Start) -> Start:
    """Set what a config leaves to the device: the dtype to compute in, what is recomputed, how
    layers are unrolled. The first process chooses for all; the checkpoint to resume from recorded
    what was chosen."""
    config = start.config

    def chosen() -> str:
        train = resolve_compute_dtype(config.train)
        recorded = _recorded_loop(start.saved.meta) if start.saved else None
        loop = layer_loop(train, config.model, recorded)
        return json.dumps({"compute_dtype": train.compute_dtype} | loop.as_keys())

    choices = json.loads(broadcast_from_first(chosen))
    chosen_train = config.train.with_choices(**choices)
    return dataclasses.replace(start, config=config._replace(train=chosen_train))


def _recorded_loop(saved: CheckpointMeta) -> LayerLoop | None:
    train = saved.run_config().train
    if train.remat == AUTO or train.scan_unroll == AUTO:  # before these were recorded
        return None
    return LayerLoop(train.remat, train.scan_unroll)


def create_mesh(start: Start) -> Mesh:
    """Return the devices of a run: as its config says, else as the checkpoint recorded, else all
    there are."""
    config, saved = start.config, start.saved
    recorded = saved.meta.sharding if saved else None
    if not is_multi_process():
        jax_setup.prepare(config.train, partial(copy_bytes, config), recorded)
    with errors_in(start.run):
        mesh = _create_run_mesh(config, recorded)
    jax_setup.settle(mesh.devices.flat[0].platform)
    connect(mesh)
    if saved and is_first_process():
        _warn_of_changes(saved.meta)
    return mesh


def _warn_of_changes(saved: CheckpointMeta) -> None:
    """Log what bears on results and differs from when a checkpoint was saved."""
    before, now = saved.versions, installed_versions()
    if saved.environment is not None:
        before, now = before | saved.environment, now | jax_setup.recorded()
    if changes := jax_setup.changes(before, now):
        log.warning(
            "step %d was saved with other settings than this start has, so the steps from here may"
            " differ from those of an uninterrupted run: %s",
            saved.global_step,
            "; ".join(changes),
        )


def _create_run_mesh(config: AnyRunConfig, recorded: ShardingConfig | None) -> Mesh:
    try:
        return create_run_mesh(config.train, config.model, recorded)
    except ValueError as error:
        lines = str(error).splitlines()
        raise UserError(
            "\n".join(f"{_file_of(line, config.train_file)}: {line}" for line in lines)
        ) from None


def _file_of(line: str, train_file: str) -> str:
    """Return the file whose key a message begins with."""
    key = re.match(r"\w*", line)
    return MODEL_FILE if key and key[0] in ModelConfig.model_fields else train_file


@contextlib.contextmanager
def errors_in(run: RunFolder) -> Iterator[None]:
    """Prefix each line of an error with the run folder."""
    try:
        yield
    except UserError as error:
        lines = str(error).splitlines()
        raise UserError("\n".join(f"{run.path}/{line}" for line in lines)) from None


def tidy(start: Start) -> None:
    """Move aside what a start leaves behind; remove what a crash left unfinished, and old
    checkpoints if keep_checkpoints was lowered."""
    run, saved = start.run, start.saved
    aside = move_aside(run, saved)
    if aside is not None and start.options.rewind_to:
        feed.forget(run)
    records.drop_samples_after(run, saved.step if saved else -1)
    clean_up(run.checkpoints)
    delete_old(run.checkpoints, start.config.train.keep_checkpoints)
    for unfinished in run.unfinished_files:
        unfinished.unlink(missing_ok=True)
    run_log.log_to_file(run.log)
    if aside is not None:
        log.info("moved aside to %s", aside)


def model_and_optimizer(start: Start, total_steps: int, mesh: Mesh) -> tuple[GPT, MultiSteps]:
    """Return the model and optimizer of the checkpoint, or fresh ones if there is none."""
    if start.saved is not None:
        return restore(start.saved, start.config, total_steps, mesh)
    arrays = place_starting_weights(start.weights, start.config, total_steps, mesh)
    return create_model_and_optimizer(start.config, total_steps, mesh, arrays)

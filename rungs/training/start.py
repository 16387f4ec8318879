"""Start a run: `launch` shows every step in order, from the checks to the last saved step. Below it
are the parts of every start: the checkpoint to resume from, devices, dtype, cleanup of the run
folder, model and optimizer."""

import dataclasses
import json
import logging
import math
import signal
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

from jax.sharding import Mesh

from rungs.checkpointing import checkpoint_folder, manifest
from rungs.checkpointing.load import Start, find_starting_weights, place_starting_weights, restore
from rungs.checkpointing.saver import Saver
from rungs.common import disk, run_log
from rungs.common.errors import UserError, errors_at
from rungs.common.shown_text import counted, format_duration
from rungs.config.base import AUTO
from rungs.config.run_config import MODEL_FILE, AnyRunConfig, errors_in_files_of, load_any_run
from rungs.evaluation.prompt_samples import check_sample_prompts
from rungs.integrations import tracking_feed
from rungs.integrations.trackers import check_trackers
from rungs.model.attention import check_kernel
from rungs.model.gpt import GPT
from rungs.model.kernels import float8
from rungs.model.remat import LayerLoop, layer_loop
from rungs.optim.precision import dtype_of, resolve_compute_dtype
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.parallel import devices, gpu_settings, jax_setup, processes
from rungs.run import layer_record, metrics, records
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import MetricsLog, NullMetricsLog
from rungs.step.state import copy_bytes, create_model_and_optimizer
from rungs.training import profiling, run_report
from rungs.training.background import Background
from rungs.training.failed_steps import FailedSteps
from rungs.training.learner import NEVER, Inputs, Kind
from rungs.training.resume import (
    checkpoint_to_resume,
    move_aside,
    refuse_changes,
    refuse_foreign_checkpoints,
    refuse_lost_checkpoints,
)
from rungs.training.run_length import RunLength, run_length
from rungs.training.trainer import EarlyStop, IntervalLosses, Trainer

EXIT_STOPPED_ELSEWHERE = 128 + signal.SIGTERM
"""Exit code if another process of the run received the signal to stop."""
_DRY_STEPS = 3
"""Steps of a dry run; the first one is compiled, and the last one is measured."""

log = logging.getLogger("rungs")


def launch(
    run: RunFolder,
    config: AnyRunConfig,
    options: StartOptions,
    kind: Kind,
    began: float | None = None,
) -> int:
    """Train a run of a kind to its end, or until a signal. Return the exit code: 0 at the end; 128
    + the number of a signal that stopped the run, after a save. `began` is the start of
    `max_minutes`, in `time.monotonic()`; None for now. Raises UserError if the run, its inputs and
    its checkpoints don't fit together, RunFailure if the run cannot continue for another reason.

    Steps 1 to 6 check everything that users may get wrong. Nothing on disk changes before step
    7."""
    # 1. The checkpoint to resume from: none with --fresh, the one named by --from, else the newest
    #    valid one.
    saved = find_checkpoint(run, options)
    # 2. The starting weights: the checkpoint's, those of start_from, or random ones. Only some keys
    #    may differ from the checkpoint's config.
    start = start_of(run, config, options, saved)
    with ExitStack() as stack:
        # 3. Data, or tasks and verifiers, unchanged for a resumed run.
        inputs = _open_inputs(start, kind, stack)
        # 4. A finished run has nothing left to train.
        length = run_length(start, inputs.total_steps, time.monotonic() if began is None else began)
        profiling.check(start, length.total_steps)
        beside = Background(start, inputs.datasets_dir)
        if start.first_step >= length.total_steps or start.stopped_after:
            return _finish(start, inputs, beside)
        # 5. The devices: as in the config, else as the checkpoint recorded, else all.
        mesh = create_mesh(start)
        # 6. Values of "auto": the compute dtype, the loop over layers.
        start = with_device_choices(start)
        if options.dry_run:
            take_steps = profiling.profile_steps if options.profile else dry_run
            with inputs.resources(start, mesh):
                take_steps(start, inputs, mesh, length)
            return 0
        # 7. Discarded checkpoints move aside; what a crash left unfinished is removed.
        with disk.writing(run.path, "what this start changes"):
            processes.run_on_first(lambda: tidy(start))
        # 8. Model and optimizer are created or restored, then the steps are taken.
        with run_log.log_failures(), inputs.resources(start, mesh):
            trainer = make_trainer(start, inputs, mesh, length, beside)
            trainer.learner.log_start(start, mesh)
            with beside.working():
                last = trainer.train(beside.stop)
                taken = last.global_step + 1 if last else start.first_step
                beside.is_complete = taken == length.total_steps
                beside.early_end = trainer.early_stop.reason
                processes.run_on_first(
                    lambda: run_report.log_end(start, length.total_steps, trainer.learner, last)
                )
            return 0 if beside.is_complete else beside.stop.exit_code or EXIT_STOPPED_ELSEWHERE


def _open_inputs(start: Start, kind: Kind, stack: ExitStack) -> Inputs[Any]:
    """Open and check everything that steps need besides devices. Raises UserError."""
    run, config = start.run, start.config
    inputs = kind.open_inputs(start, stack)
    check_trackers(config.train.trackers, f"{run.path / config.train_file}: trackers")
    with errors_in_files_of(run.path):
        check_sample_prompts(config, inputs.record.tokenizer_place)
    if start.is_branching and start.first_step >= inputs.total_steps:
        raise UserError(
            f"{run.path / config.train_file}: it has {counted(inputs.total_steps, 'step')}, so none"
            f" is left after step {config.train.branch_step:,}; set more max_steps,"
            " min_train_tokens or epochs"
        )
    return inputs


def _finish(start: Start, inputs: Inputs[Any], background: Background) -> int:
    """Finish what a kill just after the last checkpoint left undone; return the exit code."""

    def finish() -> None:
        checkpoint_folder.clean_up(start.run.checkpoints)
        checkpoint_folder.delete_old(start.run.checkpoints, start.config.train.keep_checkpoints)
        run_report.log_finished(start, inputs.edit_to_extend(start.first_step))

    if start.options.dry_run:
        log.info("%s is finished: %s steps", start.run.path, f"{start.first_step:,}")
        return 0
    with disk.writing(start.run.path, "what is left to do"), background.catching_up():
        processes.run_on_first(finish)
    return 0


def make_trainer(
    start: Start, inputs: Inputs[Any], mesh: Mesh, length: RunLength, background: Background
) -> Trainer[Any]:
    """Return the trainer of a start. The first process writes the metrics for all."""
    run, config, last_step = start.run, start.config, start.first_step - 1
    recorded = metrics.stream(run.metrics, inputs.metrics)
    steps = [step for step in recorded if step.global_step <= last_step]
    if len(steps) <= last_step:
        log.warning(
            "%s: lacks %s before the checkpoint; charts don't show them, and spikes and stop_after"
            " are decided without them",
            *(run.metrics, counted(last_step + 1 - len(steps), "step")),
        )
    learner = inputs.learner(start, mesh, steps)
    written: MetricsLog[Any] = NullMetricsLog()
    if processes.is_first_process():
        on_step = background.step_taken
        written = MetricsLog(run.metrics, last_step, inputs.metrics, on_step)
    saver = Saver(
        run.checkpoints,
        config,
        inputs.record.tokenizer_file,
        before=written.sync,
        after=(background.checkpoint_saved,),
        starts_from=start.weights,
    )
    sharding = devices.recorded_sharding(config.train, mesh)
    trainer = Trainer(
        start=start,
        mesh=mesh,
        length=length,
        learner=learner,
        metrics=written,
        saver=saver,
        failed_steps=FailedSteps(start, length, learner, saver, sharding, steps),
        early_stop=EarlyStop(
            config.train, [s for s in steps if s.global_step > config.train.branch_step]
        ),
        losses=IntervalLosses(config.train.checkpoint_interval, steps),
        benchmarks=inputs.benchmarks,
    )
    last = steps[-1] if steps else None
    if start.saved and last and last.global_step == start.saved.step:  # else its line was lost
        trainer.unvalidated = last if learner.lacks_validation(start.saved, last) else None
    return trainer


def dry_run(start: Start, inputs: Inputs[Any], mesh: Mesh, length: RunLength) -> None:
    """Create or restore model and optimizer, take a few steps and log a forecast; write nothing."""
    learner = inputs.learner(start, mesh, ())
    learner.log_start(start, mesh)
    losses, times = [], [time.perf_counter()]
    for step in range(start.first_step, min(start.first_step + _DRY_STEPS, length.total_steps)):
        taken = learner.take(step, NEVER, length.learning_rate(step))
        losses.append(learner.read(step, taken)[1].loss)
        times.append(time.perf_counter())
    pace = times[-1] - times[-2]
    config, first, left = start.config, start.first_step, length.left(start.first_step, pace)
    seconds = pace * length.work(first, first + left) / length.work(first, first + 1)
    log.info(
        "dry run: the first step has loss %s (ln of vocab_size: %.4f); it took %s with compilation,"
        " another one %s (%s tokens per second); %s steps are left: about %s without validation;"
        " nothing was written into the run folder",
        "none" if losses[0] is None else f"{losses[0]:.4f}",
        math.log(start.config.model.vocab_size),
        *(format_duration(times[1] - times[0]), format_duration(pace)),
        f"{(config.tokens_before(step + 1) - config.tokens_before(step)) / pace:,.0f}",
        *(f"{left:,}", format_duration(seconds)),
    )


def find_checkpoint(run: RunFolder, start: StartOptions) -> manifest.Checkpoint | None:
    """Return the checkpoint to resume from; the first process chooses it for all."""

    def name() -> str:
        found = checkpoint_to_resume(run, start)
        return found.folder.name if found else ""

    chosen = processes.broadcast_from_first(name)
    return manifest.read_checkpoint(run.checkpoints / chosen) if chosen else None


def start_of(
    run: RunFolder, config: AnyRunConfig, options: StartOptions, saved: manifest.Checkpoint | None
) -> Start:
    """Return a start that resumes from a checkpoint, or begins with the weights of `start_from` or
    random ones. Raises UserError if these are missing, or the config has forbidden changes."""
    if saved is None and config.train.branch_step >= 0:
        raise UserError(
            f"{run.path}: begins with a checkpoint of step {config.train.branch_step}, and can't"
            " start without one; go back to one with --from, or create another run with --like"
            " and --from-step"
        )
    if saved is None:
        refuse_foreign_checkpoints(run)
        if not options.fresh:
            refuse_lost_checkpoints(run, config)
        return Start(run, config, options, None, find_starting_weights(run, config))
    config = refuse_changes(saved.meta, config, run, options.extend)
    return Start(run, config, options, saved, saved.weights)


def refuse_to_restore(saved: manifest.CheckpointMeta, run: RunFolder, start: StartOptions) -> None:
    """Refuse a mirror's checkpoint if the configs in the run folder, which may not exist, can't
    resume from it; see `refuse_changes`."""
    if not start.fresh and (run.path / MODEL_FILE).is_file():
        refuse_changes(saved, load_any_run(run.path), run, start.extend)


def with_device_choices(start: Start) -> Start:
    """Resolve "auto" in a config: compute dtype, recomputation, unrolling of layers. The first
    process chooses for all; a resumed run takes what its checkpoint recorded."""
    config = start.config

    def chosen() -> str:
        train = resolve_compute_dtype(config.train)
        recorded = None
        if start.saved:
            before = start.saved.meta.run_config().train
            if before.remat != AUTO and before.scan_unroll != AUTO:
                recorded = LayerLoop(before.remat, before.scan_unroll)
        loop = layer_loop(train, config.model, recorded)
        return json.dumps({"compute_dtype": train.compute_dtype} | loop.as_keys())

    choices = json.loads(processes.broadcast_from_first(chosen))
    chosen_train = config.train.with_choices(**choices)
    return dataclasses.replace(start, config=config._replace(train=chosen_train))


def create_mesh(start: Start) -> Mesh:
    """Return the devices of a run: as in its config, else as the checkpoint recorded, else all."""
    config, saved = start.config, start.saved
    recorded = saved.meta.sharding if saved else None
    if not processes.is_multi_process():
        jax_setup.prepare(config.train, partial(copy_bytes, config), recorded)
        if start.options.profile:
            gpu_settings.disable_graphs()
    with errors_at(f"{start.run.path}: ", ValueError):
        mesh = devices.create_run_mesh(config.train, config.model, recorded)
    with errors_in_files_of(start.run.path):
        float8.check_device(config.train)
        check_kernel(config.model, config.train, dtype_of(config.train))
    jax_setup.settle(mesh.devices.flat[0].platform)
    processes.connect(mesh)
    if saved and processes.is_first_process():
        _warn_of_changes(saved.meta)
    return mesh


def _warn_of_changes(saved: manifest.CheckpointMeta) -> None:
    """Log differences that may affect results since a checkpoint was saved."""
    before = saved.versions | saved.environment
    now = manifest.installed_versions() | jax_setup.recorded()
    if changes := jax_setup.changes(before, now):
        log.warning(
            "step %d was saved with other settings than this start has, so the steps from here may"
            " differ from those of an uninterrupted run: %s",
            saved.global_step,
            "; ".join(changes),
        )


def tidy(start: Start) -> None:
    """Move discarded checkpoints aside; remove what a crash left unfinished, and old checkpoints if
    keep_checkpoints was lowered."""
    run, saved = start.run, start.saved
    aside = move_aside(run, saved)
    if aside is not None and start.options.rewind_to:
        tracking_feed.forget(run)
    last_step = saved.step if saved else -1
    records.drop_samples_after(run, last_step)
    layer_record.drop_after(run.layers, last_step)
    checkpoint_folder.clean_up(run.checkpoints)
    checkpoint_folder.delete_old(run.checkpoints, start.config.train.keep_checkpoints)
    for unfinished in run.unfinished_files:
        unfinished.unlink(missing_ok=True)
    run_log.log_to_file(run.log)
    if aside is not None:
        log.info("moved aside to %s", aside)


def model_and_optimizer(
    start: Start, total_steps: int, mesh: Mesh
) -> tuple[GPT, SkippingOptimizer]:
    """Return the model and optimizer of the checkpoint, or new ones without a checkpoint."""
    if start.saved is not None:
        return restore(start.saved, start.config, total_steps, mesh)
    arrays = place_starting_weights(start.weights, start.config, total_steps, mesh)
    return create_model_and_optimizer(start.config, total_steps, mesh, arrays)

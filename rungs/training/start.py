"""Start a run: `launch` shows every step in order, from the checks to the last saved step."""

import logging
import time
from contextlib import ExitStack
from typing import Any

from jax.sharding import Mesh

from rungs.checkpointing.load import find_starting_weights
from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.retention import clean_up
from rungs.checkpointing.saver import Saver
from rungs.common import disk, run_log
from rungs.config.run_config import AnyRunConfig
from rungs.parallel.devices import recorded_sharding
from rungs.parallel.processes import run_on_first
from rungs.prompt_samples.prompts import check_sample_prompts
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import StepRecord
from rungs.tracking.tracker import check_trackers
from rungs.training import run_report
from rungs.training.background import Background
from rungs.training.dry_run import dry_run
from rungs.training.failed_step import FailedStepRecorder, FailedSteps
from rungs.training.learner import Inputs, Kind, Start
from rungs.training.preparation import (
    EXIT_STOPPED_ELSEWHERE,
    create_mesh,
    errors_in,
    find_checkpoint,
    metrics_log,
    mirror_of,
    tidy,
    with_device_choices,
    with_recorded_dtype,
)
from rungs.training.resume import refuse_changes
from rungs.training.run_length import RunLength, run_length
from rungs.training.trainer import Trainer

log = logging.getLogger("rungs")


def launch(
    run: RunFolder,
    config: AnyRunConfig,
    options: StartOptions,
    kind: Kind,
    began: float | None = None,
) -> int:
    """Train a run to its end, or until a signal.

    Steps 1 to 6 check everything that the user could have got wrong. Nothing on disk changes
    before step 7.

    Args:
        kind: what it learns from, and how.
        began: when the time of `max_minutes` began, in `time.monotonic()`; None for now.

    Returns:
        The exit code: 0 at the end; 128 + the number of a signal that stopped the run, after a
        save.

    Raises:
        UserError: the run, its inputs and its checkpoints don't fit together.
        RunFailure: the run cannot continue, through no mistake of the user.
    """
    # 1. The checkpoint to resume from: none with --fresh, the one that --from names, otherwise the
    #    newest valid one. Only some keys of the config may differ from those it was saved with.
    saved = find_checkpoint(run, options)
    if saved is not None:
        config = config._replace(train=with_recorded_dtype(config.train, saved.meta))
        refuse_changes(saved.meta, config, run, options.extend)
    # 2. The weights to start from: the checkpoint's, those that start_from names, or random ones.
    weights = saved.weights if saved else find_starting_weights(run, config)
    start = Start(run, config, options, saved, weights)
    with ExitStack() as stack:
        # 3. Data, or tasks and verifiers. A resumed run must have those it was started with.
        inputs = kind.open_inputs(start, stack)
        check_trackers(config.train.trackers, f"{run.path / config.train_file}: trackers")
        with errors_in(run):
            check_sample_prompts(config, inputs.tokenizer_place)
        # 4. A finished run has nothing left to train.
        length = run_length(start, inputs.total_steps, time.monotonic() if began is None else began)
        mirror = mirror_of(run, config.train, options)
        last_step = start.first_step - 1
        if start.first_step >= length.total_steps:
            beside = Background(run, config.train, mirror, options, last_step, inputs.datasets_dir)
            return _finish(start, inputs, beside)
        # 5. The devices: as the config says, else as the checkpoint recorded, else all there are.
        mesh = create_mesh(run, config, saved)
        # 6. What "auto" leaves to the devices: the dtype to compute in, the loop over layers.
        config = with_device_choices(config, saved)
        start = start.with_config(config)
        if options.dry_run:
            with inputs.resources(start, mesh):
                dry_run(start, inputs, mesh, length)
            return 0
        # 7. What this start leaves behind moves aside; what a crash left unfinished is removed.
        with disk.writing(run.path, "what this start changes"):
            run_on_first(lambda: tidy(run, config.train, saved, options))
        # 8. Model and optimizer are created or restored, then the steps are taken.
        with run_log.log_failures(), inputs.resources(start, mesh):
            beside = Background(run, config.train, mirror, options, last_step, inputs.datasets_dir)
            trainer = make_trainer(start, inputs, mesh, length, beside)
            trainer.learner.log_start(start, mesh)
            with beside:
                last = trainer.train(beside.stop)
                taken = last.global_step + 1 if last else start.first_step
                beside.is_complete = taken == length.total_steps
                run_on_first(lambda: run_report.log_end(start, trainer, last))
            return 0 if beside.is_complete else beside.stop.exit_code or EXIT_STOPPED_ELSEWHERE


def _finish(start: Start, inputs: Inputs[Any], background: Background) -> int:
    """Do what a kill just after the last checkpoint left undone; return the exit code."""

    def finish() -> None:
        clean_up(start.run.checkpoints)
        run_report.log_finished(start, inputs.edit_to_extend())

    if start.options.dry_run:
        log.info("%s is finished: %s steps", start.run.path, f"{start.first_step:,}")
        return 0
    with disk.writing(start.run.path, "what is left to do"), background.catching_up():
        run_on_first(finish)
    return 0


def make_trainer(
    start: Start, inputs: Inputs[Any], mesh: Mesh, length: RunLength, background: Background
) -> Trainer[Any]:
    """Return what takes the steps of a start."""
    run, config = start.run, start.config
    steps = _steps_before(run, start.saved, inputs)
    learner = inputs.learner(start, mesh, steps)
    written = metrics_log(run, start.first_step - 1, inputs.metrics, background.step_taken)
    saver = Saver(
        run.checkpoints,
        config,
        inputs.tokenizer_file,
        before=written.sync,
        after=(background.checkpoint_saved,),
        starts_from=start.weights,
        check=run.check,
    )
    sharding = recorded_sharding(config.train, mesh)
    recorder = FailedStepRecorder(run, config, length, learner.batch, sharding)
    limit = config.train.max_non_finite_steps
    trainer = Trainer(
        start=start,
        mesh=mesh,
        length=length,
        learner=learner,
        metrics=written,
        saver=saver,
        failed_steps=FailedSteps(recorder, learner, saver, steps, limit),
    )
    last = steps[-1] if steps else None
    if start.saved and last and last.global_step == start.saved.step:  # else its line was lost
        trainer.unvalidated = last if learner.lacks_validation(start.saved, last) else None
    inputs.add_hooks(start, trainer)
    return trainer


def _steps_before(
    run: RunFolder, saved: Checkpoint | None, inputs: Inputs[Any]
) -> list[StepRecord]:
    """Return the recorded steps up to the checkpoint."""
    last = saved.step if saved else -1
    return [s for s in metrics.stream(run.metrics, inputs.metrics) if s.global_step <= last]

"""Start a run: `launch` shows every step in order, from the checks to the last saved step."""

import logging
import math
import time
from contextlib import ExitStack
from typing import Any

from jax.sharding import Mesh

from rungs.checkpointing.checkpoint_folder import clean_up
from rungs.checkpointing.saver import Saver
from rungs.common import disk, run_log
from rungs.common.text_table import format_duration
from rungs.config.run_config import AnyRunConfig
from rungs.parallel.devices import recorded_sharding
from rungs.parallel.processes import is_first_process, run_on_first
from rungs.prompt_samples.sampler import check_sample_prompts
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import MetricsLog, NullMetricsLog
from rungs.tracking.tracker import check_trackers
from rungs.training import run_report
from rungs.training.background import Background
from rungs.training.failed_step import FailedStepRecorder, FailedSteps
from rungs.training.learner import NEVER, Inputs, Kind, Start
from rungs.training.preparation import (
    EXIT_STOPPED_ELSEWHERE,
    create_mesh,
    errors_in,
    find_checkpoint,
    start_of,
    tidy,
    with_device_choices,
)
from rungs.training.trainer import Trainer

log = logging.getLogger("rungs")


def launch(run: RunFolder, config: AnyRunConfig, options: StartOptions, kind: Kind) -> int:
    """Train a run to its end, or until a signal.

    Steps 1 to 6 check everything that the user could have got wrong. Nothing on disk changes
    before step 7.

    Args:
        kind: what it learns from, and how.

    Returns:
        The exit code: 0 at the end; 128 + the number of a signal that stopped the run, after a
        save.

    Raises:
        UserError: the run, its inputs and its checkpoints don't fit together.
        RunFailure: the run cannot continue, through no mistake of the user.
    """
    # 1. The checkpoint to resume from: none with --fresh, the one that --from names, otherwise the
    #    newest valid one.
    saved = find_checkpoint(run, options)
    # 2. The weights to start from: the checkpoint's, those that start_from names, or random ones.
    #    Only some keys of the config may differ from those the checkpoint was saved with.
    start = start_of(run, config, options, saved)
    config = start.config
    with ExitStack() as stack:
        # 3. Data, or tasks and verifiers. A resumed run must have those it was started with.
        inputs = kind.open_inputs(start, stack)
        check_trackers(config.train.trackers, f"{run.path / config.train_file}: trackers")
        with errors_in(run):
            check_sample_prompts(config, inputs.tokenizer_place)
        # 4. A finished run has nothing left to train.
        beside = Background(start, inputs.datasets_dir)
        if start.first_step >= inputs.total_steps:
            return _finish(start, inputs, beside)
        # 5. The devices: as the config says, else as the checkpoint recorded, else all there are.
        mesh = create_mesh(start)
        # 6. What "auto" leaves to the devices: the dtype to compute in, the loop over layers.
        start = with_device_choices(start)
        if options.dry_run:
            with inputs.resources(start, mesh):
                dry_run(start, inputs, mesh)
            return 0
        # 7. What this start leaves behind moves aside; what a crash left unfinished is removed.
        with disk.writing(run.path, "what this start changes"):
            run_on_first(lambda: tidy(start))
        # 8. Model and optimizer are created or restored, then the steps are taken.
        with run_log.log_failures(), inputs.resources(start, mesh):
            trainer = make_trainer(start, inputs, mesh, beside)
            trainer.learner.log_start(start, mesh)
            with beside:
                last = trainer.train(beside.stop)
                taken = last.global_step + 1 if last else start.first_step
                beside.is_complete = taken == inputs.total_steps
                run_on_first(lambda: run_report.log_end(start, trainer, last))
            return 0 if beside.is_complete else beside.stop.exit_code or EXIT_STOPPED_ELSEWHERE


def _finish(start: Start, inputs: Inputs[Any], background: Background) -> int:
    """Do what a kill just after the last checkpoint left undone; return the exit code."""

    def finish() -> None:
        clean_up(start.run.checkpoints)
        run_report.log_finished(start, inputs.edit_to_extend())

    if start.options.dry_run:
        log.info("%s is finished: %s steps", start.run.path, f"{inputs.total_steps:,}")
        return 0
    with disk.writing(start.run.path, "what is left to do"), background.catching_up():
        run_on_first(finish)
    return 0


def make_trainer(
    start: Start, inputs: Inputs[Any], mesh: Mesh, background: Background
) -> Trainer[Any]:
    """Return what takes the steps of a start. The first process writes the metrics for all."""
    run, config, last_step = start.run, start.config, start.first_step - 1
    recorded = metrics.stream(run.metrics, inputs.metrics)
    steps = [step for step in recorded if step.global_step <= last_step]
    learner = inputs.learner(start, mesh, steps)
    written: MetricsLog[Any] = NullMetricsLog()
    if is_first_process():
        on_step = background.step_taken
        written = MetricsLog(run.metrics, last_step, inputs.metrics, on_step, run.check)
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
    recorder = FailedStepRecorder(run, config, inputs.total_steps, learner.batch, sharding)
    limit = config.train.max_non_finite_steps
    trainer = Trainer(
        start=start,
        mesh=mesh,
        total_steps=inputs.total_steps,
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


_STEPS = 3
"""The first one is compiled, and the last one is measured."""


def dry_run(start: Start, inputs: Inputs[Any], mesh: Mesh) -> None:
    """Create or restore model and optimizer, take a few steps and log what the run will take.
    Nothing on disk changes."""
    learner = inputs.learner(start, mesh, ())
    learner.log_start(start, mesh)
    losses, times = [], [time.perf_counter()]
    for step in range(start.first_step, min(start.first_step + _STEPS, inputs.total_steps)):
        losses.append(learner.read(step, learner.take(step, NEVER))[1].loss)
        times.append(time.perf_counter())
    left = inputs.total_steps - start.first_step
    log.info(
        "dry run: the first step has loss %s (ln of vocab_size: %.4f); it took %s with compilation,"
        " another one %s; %s steps are left: about %s without validation; nothing was"
        " written into the run folder",
        "none" if losses[0] is None else f"{losses[0]:.4f}",
        math.log(start.config.model.vocab_size),
        *(format_duration(times[1] - times[0]), format_duration(times[-1] - times[-2])),
        *(f"{left:,}", format_duration(left * (times[-1] - times[-2]))),
    )

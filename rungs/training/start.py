"""Start a run: `launch` shows every step in order, from the checks to the last saved step."""

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.retention import clean_up
from rungs.checkpointing.saver import Saver
from rungs.checkpointing.start_from import find_starting_weights
from rungs.checkpointing.weights_file import Weights
from rungs.common import disk, run_log
from rungs.config.run_config import RunConfig
from rungs.data.catalog import open_dataset
from rungs.data.dataset import Dataset
from rungs.data.loader import TrainingData, ValidationSets
from rungs.data.provenance import Provenance, check_same_tokenizer
from rungs.data.tokenizer_files import load_tokenizer
from rungs.parallel.devices import recorded_sharding
from rungs.parallel.processes import (
    check_all_agree,
    is_first_process,
    is_multi_process,
    run_on_first,
)
from rungs.planning import disk_space, oom_advice
from rungs.prompt_samples.prompts import check_sample_prompts
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import StepMetrics
from rungs.tracking.tracker import check_trackers
from rungs.training import run_report
from rungs.training.background import Background
from rungs.training.benchmarks import Benchmarks
from rungs.training.dry_run import dry_run
from rungs.training.failed_step import FailedStepRecorder
from rungs.training.intervals import is_validation_step
from rungs.training.loss_spikes import LossSpikeDetector
from rungs.training.preparation import (
    EXIT_STOPPED_ELSEWHERE,
    create_mesh,
    errors_in,
    find_checkpoint,
    metrics_log,
    mirror_of,
    model_and_optimizer,
    tidy,
    with_device_choices,
    with_recorded_dtype,
)
from rungs.training.result_reader import ResultReader
from rungs.training.resume import edit_to_extend, refuse_changes
from rungs.training.trainer import Trainer

log = logging.getLogger("rungs")


class Inputs(NamedTuple):
    """What a start has found and checked before it changes anything."""

    run: RunFolder
    config: RunConfig
    saved: Checkpoint | None
    """The checkpoint to resume from."""
    weights: Weights | None
    """The weights to start from; None if they are random."""
    data: TrainingData
    validation: ValidationSets
    provenance: Provenance
    datasets_dir: Path
    benchmarks: Benchmarks | None

    @property
    def first_step(self) -> int:
        return self.saved.step + 1 if self.saved else 0

    @property
    def unmeasured(self) -> int | None:
        """The checkpoint's step, if a kill or a signal interrupted its benchmarks."""
        if self.saved is None or self.benchmarks is None:
            return None
        return self.saved.step if self.benchmarks.is_missing(self.saved) else None


def launch(run: RunFolder, config: RunConfig, start: StartOptions, datasets_dir: Path) -> int:
    """Train a run to its end, or until a signal.

    Steps 1 to 6 check everything that the user could have got wrong. Nothing on disk changes
    before step 7.

    Returns:
        The exit code: 0 at the end; 128 + the number of a signal that stopped the run, after a
        save.

    Raises:
        UserError: the run, its data and its checkpoints don't fit together.
        RunFailure: the run cannot continue, through no mistake of the user.
    """
    # 1. The checkpoint to resume from: none with --fresh, the one that --from names, otherwise the
    #    newest valid one. Only some keys of the config may differ from those it was saved with.
    saved = find_checkpoint(run, start)
    if saved is not None:
        config = config._replace(train=with_recorded_dtype(config.train, saved.meta))
        refuse_changes(saved.meta, config, run, start.extend)
    # 2. The weights to start from: the checkpoint's, those that start_from names, or random ones.
    weights = saved.weights if saved else find_starting_weights(run, config)
    # 3. The data. A resumed run uses the local copy, which must be the one it was started with.
    data, validation, provenance = _open_data(run, config, saved, weights, datasets_dir)
    benchmarks = Benchmarks.of(run, config.train, provenance.tokenizer_place)
    check_trackers(config.train.trackers, f"{run.path / config.train_file}: trackers")
    with errors_in(run):
        check_sample_prompts(config, provenance.tokenizer_place)
    # 4. A finished run has nothing left to train.
    mirror = mirror_of(run, config.train, start)
    if start.dry_run and saved is not None and saved.step + 1 >= data.total_steps:
        log.info("%s is finished: %s steps", run.path, f"{data.total_steps:,}")
        return 0
    if saved is not None and saved.step + 1 >= data.total_steps:
        background = Background(run, config.train, mirror, start, saved.step, datasets_dir)
        edit = edit_to_extend(config, data)
        _finish(run, saved.step + 1, edit, background)
        return 0
    # 5. The devices: as train.json says, else as the checkpoint recorded, else all there are.
    mesh = create_mesh(run, config, saved)
    # 6. What "auto" leaves to the devices: the dtype to compute in, the loop over layers.
    config = with_device_choices(config, saved)
    if start.dry_run:
        with oom_advice.report_out_of_memory(config, mesh, weights.dtypes() if weights else None):
            dry_run(run, config, data, saved, weights, mesh)
        return 0
    # 7. What this start leaves behind moves aside; what a crash left unfinished is removed.
    with disk.writing(run.path, "what this start changes"):
        run_on_first(lambda: tidy(run, config.train, saved, start))
    # 8. Model and optimizer are created or restored, then the steps are taken.
    inputs = Inputs(
        run, config, saved, weights, data, validation, provenance, datasets_dir, benchmarks
    )
    stored = weights.dtypes() if weights else None
    if is_first_process():
        disk_space.warn_if_short(run, config, data.total_steps, stored)
    with run_log.log_failures(), oom_advice.report_out_of_memory(config, mesh, stored):
        oom_advice.warn_if_too_large(config, mesh, stored)
        last_step = inputs.first_step - 1
        background = Background(run, config.train, mirror, start, last_step, datasets_dir)
        return _train(inputs, mesh, background)


def _open_data(
    run: RunFolder,
    config: RunConfig,
    saved: Checkpoint | None,
    weights: Weights | None,
    datasets_dir: Path,
) -> tuple[TrainingData, ValidationSets, Provenance]:
    """Open all data of a run, and check that they are those it was started with."""
    train = config.train
    names = train.datasets, train.validation_datasets
    datasets, others = _open_datasets(names, datasets_dir, update=saved is None)
    provenance = Provenance.of(train, datasets)
    check_all_agree("configs and datasets", f"{config} {provenance.datasets}")
    if saved is not None:
        provenance.check_same_tokens(saved.meta.datasets)
    model_tokenizer = weights.tokenizer if weights and not saved else None
    check_same_tokenizer(datasets | others, train.tokenizer, model_tokenizer)
    with errors_in(run):
        data = TrainingData(config, datasets)
        return data, ValidationSets.of(config, datasets, others), provenance


def _open_datasets(
    names: Iterable[Iterable[str]], datasets_dir: Path, update: bool
) -> list[dict[str, Dataset]]:
    """Open several groups of datasets; the first process builds those that are absent."""

    def open_all(update: bool) -> list[dict[str, Dataset]]:
        return [
            {name: open_dataset(name, datasets_dir, update=update) for name in group}
            for group in names
        ]

    if not is_multi_process():
        return open_all(update)
    run_on_first(lambda: open_all(update))
    return open_all(update=False)


def _train(inputs: Inputs, mesh: Mesh, background: Background) -> int:
    """Take the steps and return the exit code."""
    run, config = inputs.run, inputs.config
    trainer = _make_trainer(inputs, mesh, background)
    run_report.log_start(
        run,
        config,
        inputs.data,
        inputs.saved,
        inputs.weights,
        recorded_sharding(config.train, mesh),
    )
    if inputs.saved is not None:
        data = inputs.provenance.validation_data(config.train)
        run_report.log_validation_change(inputs.saved.meta.validation_data, data)
    elif is_first_process():  # a resumed run must keep its keys
        run_report.warn_of_unused_keys(run, config, bool(inputs.validation))
    run_report.log_size(run, config, inputs.data, trainer.model, trainer.optimizer, mesh)
    run_report.log_padding(inputs.data)
    run_report.log_beginnings(inputs.data, trainer.tokenizer)
    run_report.log_trainable(trainer.model, trainer.optimizer)
    run_report.warn_of_idle_devices(config.train, mesh)
    with background:
        last = trainer.train(background.stop)
        is_stopped = last.global_step + 1 < inputs.data.total_steps
        background.is_complete = not is_stopped
        run_on_first(lambda: run_report.log_end(run, config, last, is_stopped))
    return (background.stop.exit_code or EXIT_STOPPED_ELSEWHERE) if is_stopped else 0


def _make_trainer(inputs: Inputs, mesh: Mesh, background: Background) -> Trainer:
    run, config, saved, data = inputs.run, inputs.config, inputs.saved, inputs.data
    model, optimizer = model_and_optimizer(config, data.total_steps, mesh, saved, inputs.weights)
    steps, tokenizer = _steps_before(run, saved), inputs.provenance.tokenizer_file
    written = metrics_log(run, inputs.first_step - 1, StepMetrics, background.step_taken)
    saver = Saver(
        run.checkpoints,
        config,
        inputs.provenance.tokenizer_file,
        before=written.sync,
        after=(background.checkpoint_saved,),
        starts_from=inputs.weights,
        check=run.check,
    )
    failed_steps = FailedStepRecorder(run, config, data, recorded_sharding(config.train, mesh))
    spikes = LossSpikeDetector(config.train, steps)
    return Trainer(
        config=config,
        data=data,
        validation=inputs.validation,
        provenance=inputs.provenance,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        first_step=inputs.first_step,
        metrics=written,
        saver=saver,
        reader=ResultReader(
            inputs.first_step,
            data.tokens_per_step,
            model,
            optimizer,
            spikes,
            failed_steps,
            saver,
        ),
        tokenizer=load_tokenizer(tokenizer) if tokenizer else None,
        benchmarks=inputs.benchmarks,
        unmeasured=inputs.unmeasured,
        unvalidated=_unvalidated(config, saved, steps) if saved and inputs.validation.own else None,
        peak_tokens_per_second=run_report.peak_tokens_per_second(config, mesh),
    )


def _steps_before(run: RunFolder, saved: Checkpoint | None) -> list[StepMetrics]:
    """Return the recorded steps up to the checkpoint."""
    last = saved.step if saved else -1
    return [step for step in metrics.read(run.metrics) if step.global_step <= last]


def _unvalidated(
    config: RunConfig, saved: Checkpoint, steps: list[StepMetrics]
) -> StepMetrics | None:
    """Return the step of a checkpoint that lacks its validation loss, None if it lacks nothing.

    A signal interrupted the validation, or the loss was not finite and will be so again.
    """
    last = next((step for step in steps if step.global_step == saved.step), None)
    if last is None or last.validation_loss is not None or saved.meta.selection_loss is not None:
        return None
    return last if is_validation_step(config.train, saved.step) else None


def _finish(run: RunFolder, steps: int, edit: str, background: Background) -> None:
    """Do what a kill just after the last checkpoint left undone.

    Args:
        edit: what makes the run longer.
    """

    def finish() -> None:
        clean_up(run.checkpoints)
        log.info(
            "%s is finished: %s steps; to train longer, %s and add --extend",
            run.path,
            f"{steps:,}",
            edit,
        )

    with disk.writing(run.path, "what is left to do"), background.catching_up():
        run_on_first(finish)

"""Start a run: `launch` shows every step in order, from the checks to the last saved step."""

import contextlib
import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jax.sharding import Mesh

from rungs.checkpointing.manifest import Checkpoint, read_checkpoint
from rungs.checkpointing.restore import place_starting_weights, restore
from rungs.checkpointing.retention import clean_up, delete_old
from rungs.checkpointing.saver import Saver
from rungs.checkpointing.start_from import find_starting_weights
from rungs.checkpointing.weights_file import Weights
from rungs.common import disk, run_log
from rungs.common.errors import UserError
from rungs.common.signals import StopSignal
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE, RunConfig
from rungs.config.train_config import ShardingConfig, TrainConfig
from rungs.data.catalog import open_dataset
from rungs.data.dataset import Dataset
from rungs.data.loader import TrainingData, ValidationData
from rungs.data.provenance import Provenance, check_same_tokenizer
from rungs.model.gpt import GPT
from rungs.optim.multi_steps import MultiSteps
from rungs.optim.precision import dtype_of, resolve_compute_dtype
from rungs.parallel import jax_setup
from rungs.parallel.devices import create_run_mesh, recorded_sharding
from rungs.parallel.processes import (
    broadcast_from_first,
    check_all_agree,
    connect,
    is_first_process,
    is_multi_process,
    run_on_first,
)
from rungs.planning import disk_space, oom_advice
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import MetricsLog, NullMetricsLog, StepMetrics
from rungs.step.state import copy_bytes, create_model_and_optimizer
from rungs.training import run_report
from rungs.training.chart_process import ChartProcess
from rungs.training.failed_step import FailedStepRecorder
from rungs.training.loss_spikes import LossSpikeDetector
from rungs.training.result_reader import ResultReader
from rungs.training.resume import (
    checkpoint_to_resume,
    edit_to_extend,
    move_aside,
    refuse_changes,
)
from rungs.training.trainer import Trainer

EXIT_STOPPED_ELSEWHERE = 128 + signal.SIGTERM
"""Exit code if another process of the run received the signal to stop."""

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
    validation: ValidationData | None
    provenance: Provenance

    @property
    def first_step(self) -> int:
        return self.saved.step + 1 if self.saved else 0


def launch(run: RunFolder, config: RunConfig, start: StartOptions, datasets_dir: Path) -> int:
    """Train a run to its end, or until a signal.

    Steps 1 to 6 check everything that the user could have got wrong. Nothing on disk changes
    before step 7.

    Returns:
        The exit code: 0 at the end; 130, 143 or 129 if SIGINT, SIGTERM or SIGHUP stopped the
        run, after a save.

    Raises:
        UserError: the run, its data and its checkpoints don't fit together.
        RunFailure: the run cannot continue, through no mistake of the user.
    """
    # 1. The checkpoint to resume from: none with --fresh, the one that --from names, otherwise the
    #    newest valid one. Only some keys of the config may differ from those it was saved with.
    saved = _find_checkpoint(run, start)
    if saved is not None:
        config = _with_recorded_dtype(config, saved)
        refuse_changes(saved.meta, config, run, start.extend)
    # 2. The weights to start from: the checkpoint's, those that start_from names, or random ones.
    weights = saved.weights if saved else find_starting_weights(run, config)
    # 3. The data. A resumed run uses the local copy, which must be the one it was started with.
    datasets = _open_datasets(config.train, datasets_dir, update=saved is None)
    provenance = Provenance.of(config.train, datasets)
    check_all_agree("configs and datasets", f"{config} {provenance.datasets}")
    _check_data(config.train, provenance, datasets, saved, weights)
    with _errors_in(run):
        data = TrainingData(config, datasets)
    validation = ValidationData.of(config, datasets)
    # 4. A finished run has nothing left to train.
    if saved is not None and saved.step + 1 >= data.total_steps:
        with disk.writing(run.path, "what is left to do"):
            run_on_first(lambda: _finish(run, saved.step + 1, edit_to_extend(config, data)))
        return 0
    # 5. The devices: as train.json says, else as the checkpoint recorded, else all there are.
    mesh = _create_mesh(run, config, saved)
    # 6. The dtype to compute in, which "auto" leaves to the devices.
    config = _with_dtype(config)
    # 7. What this start leaves behind moves aside; what a crash left unfinished is removed, and so
    #    are old checkpoints if keep_checkpoints was lowered.
    with disk.writing(run.path, "what this start changes"):
        run_on_first(lambda: _tidy(run, config, saved))
    # 8. Model and optimizer are created or restored, then the steps are taken.
    inputs = Inputs(run, config, saved, weights, data, validation, provenance)
    stored = weights.dtypes() if weights else None
    if is_first_process():
        disk_space.warn_if_short(run, config, data.total_steps, stored)
    with run_log.log_failures(), oom_advice.report_out_of_memory(config, mesh, stored):
        oom_advice.warn_if_too_large(config, mesh, stored)
        return _train(inputs, mesh)


def _find_checkpoint(run: RunFolder, start: StartOptions) -> Checkpoint | None:
    """Return the checkpoint to resume from; the first process chooses it for all."""

    def name() -> str:
        found = checkpoint_to_resume(run, start)
        return found.folder.name if found else ""

    chosen = broadcast_from_first(name)
    return read_checkpoint(run.checkpoints / chosen) if chosen else None


def _with_recorded_dtype(config: RunConfig, saved: Checkpoint) -> RunConfig:
    recorded = saved.meta.run_config().train.compute_dtype
    return config._replace(train=resolve_compute_dtype(config.train, recorded))


def _open_datasets(train: TrainConfig, datasets_dir: Path, update: bool) -> dict[str, Dataset]:
    """Open each dataset of a run; the first process builds those that are absent."""

    def open_all(update: bool) -> dict[str, Dataset]:
        return {name: open_dataset(name, datasets_dir, update=update) for name in train.datasets}

    if not is_multi_process():
        return open_all(update)
    run_on_first(lambda: open_all(update))
    return open_all(update=False)


def _check_data(
    train: TrainConfig,
    provenance: Provenance,
    datasets: dict[str, Dataset],
    saved: Checkpoint | None,
    weights: Weights | None,
) -> None:
    if saved is not None:
        provenance.check_same_tokens(saved.meta.datasets)
    elif weights is not None:
        check_same_tokenizer(datasets, train.tokenizer, weights.tokenizer)


def _create_mesh(run: RunFolder, config: RunConfig, saved: Checkpoint | None) -> Mesh:
    recorded = saved.meta.sharding if saved else None
    if not is_multi_process():
        jax_setup.prepare(config.train, copy_bytes(config), recorded)
    with _errors_in(run):
        mesh = _create_run_mesh(config, recorded)
    jax_setup.settle(mesh.devices.flat[0].platform)
    connect(mesh)
    return mesh


def _with_dtype(config: RunConfig) -> RunConfig:
    """Set the dtype to compute in; the first process chooses it for all."""
    dtype = broadcast_from_first(lambda: dtype_of(config.train).name)
    return config._replace(train=config.train.model_copy(update={"compute_dtype": dtype}))


def _train(inputs: Inputs, mesh: Mesh) -> int:
    """Take the steps and return the exit code."""
    run, config = inputs.run, inputs.config
    drawer = ChartProcess(run.path)
    trainer = _make_trainer(inputs, mesh, drawer)
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
        run_report.warn_of_unused_keys(run, config, inputs.validation is not None)
    run_report.log_size(run, config, inputs.data, trainer.model, trainer.optimizer, mesh)
    run_report.log_trainable(trainer.model, trainer.optimizer)
    run_report.warn_of_idle_devices(config.train, mesh)
    run_report.log_shared_cores(config.train, mesh)
    with StopSignal() as stop:
        try:
            last = trainer.train(stop)
        finally:
            drawer.finish()
    is_stopped = last.global_step + 1 < inputs.data.total_steps
    run_on_first(lambda: run_report.log_end(run, config, last, is_stopped))
    return (stop.exit_code or EXIT_STOPPED_ELSEWHERE) if is_stopped else 0


def _make_trainer(inputs: Inputs, mesh: Mesh, drawer: ChartProcess) -> Trainer:
    run, config, saved, weights, data, validation, provenance = inputs
    model, optimizer = model_and_optimizer(config, data.total_steps, mesh, saved, weights)
    steps = _steps_before(run, saved)
    metrics_log = _metrics_log(run, saved)
    tokenizer_file = provenance.tokenizer_file
    saver = Saver(
        run.checkpoints, config, tokenizer_file, metrics_log.sync, drawer.request, weights
    )
    failed_steps = FailedStepRecorder(run, config, data, recorded_sharding(config.train, mesh))
    spikes = LossSpikeDetector(config.train, steps)
    return Trainer(
        config=config,
        data=data,
        validation=validation,
        provenance=provenance,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        first_step=inputs.first_step,
        metrics=metrics_log,
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
        unvalidated=_unvalidated(saved, steps) if saved and validation else None,
        peak_tokens_per_second=run_report.peak_tokens_per_second(config, mesh),
    )


@contextlib.contextmanager
def _errors_in(run: RunFolder) -> Iterator[None]:
    """Prefix each line of an error with the run folder."""
    try:
        yield
    except UserError as error:
        lines = str(error).splitlines()
        raise UserError("\n".join(f"{run.path}/{line}" for line in lines)) from None


def model_and_optimizer(
    config: RunConfig,
    total_steps: int,
    mesh: Mesh,
    saved: Checkpoint | None,
    weights: Weights | None,
) -> tuple[GPT, MultiSteps]:
    """Return the model and optimizer of a checkpoint, or fresh ones if there is none.

    Args:
        weights: what a fresh model starts from; None for random weights.
    """
    if saved is not None:
        return restore(saved, config, total_steps, mesh)
    arrays = place_starting_weights(weights, config, total_steps, mesh)
    return create_model_and_optimizer(config, total_steps, mesh, arrays)


def _create_run_mesh(config: RunConfig, recorded: ShardingConfig | None) -> Mesh:
    try:
        return create_run_mesh(config.train, config.model, recorded)
    except ValueError as error:
        lines = str(error).splitlines()
        raise UserError("\n".join(f"{_file_of(line)}: {line}" for line in lines)) from None


def _file_of(line: str) -> str:
    """Return the file whose key a message begins with."""
    key = re.match(r"\w*", line)
    return MODEL_FILE if key and key[0] in ModelConfig.model_fields else TRAIN_FILE


def _tidy(run: RunFolder, config: RunConfig, saved: Checkpoint | None) -> None:
    aside = move_aside(run, saved)
    clean_up(run.checkpoints)
    delete_old(run.checkpoints, config.train.keep_checkpoints)  # it may have been lowered
    for unfinished in run.unfinished_charts:
        unfinished.unlink(missing_ok=True)
    run_log.log_to_file(run.log)
    if aside is not None:
        log.info("moved aside to %s", aside)


def _steps_before(run: RunFolder, saved: Checkpoint | None) -> list[StepMetrics]:
    """Return the recorded steps up to the checkpoint."""
    last = saved.step if saved else -1
    return [step for step in metrics.read(run.metrics) if step.global_step <= last]


def _metrics_log(run: RunFolder, saved: Checkpoint | None) -> MetricsLog:
    if not is_first_process():
        return NullMetricsLog()
    return MetricsLog(run.metrics, last_step=saved.step if saved else -1)


def _unvalidated(saved: Checkpoint, steps: list[StepMetrics]) -> StepMetrics | None:
    """Return the step of a checkpoint that lacks its validation loss, None if it lacks nothing.

    A signal interrupted the validation, or the loss was not finite and will be so again.
    """
    is_due = saved.step % saved.meta.train["checkpoint_interval"] == 0
    if not is_due or saved.meta.selection_loss is not None:
        return None
    return next((step for step in steps if step.global_step == saved.step), None)


def _finish(run: RunFolder, steps: int, edit: str) -> None:
    """Do what a kill just after the last checkpoint left undone.

    Args:
        edit: what makes the run longer.
    """
    clean_up(run.checkpoints)
    drawer = ChartProcess(run.path)
    drawer.request()
    drawer.finish()
    log.info(
        "%s is finished: %s steps; to train longer, %s and add --extend",
        run.path,
        f"{steps:,}",
        edit,
    )

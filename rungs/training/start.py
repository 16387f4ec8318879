"""From a run folder to its trainer: what a start checks, in which order, and what it moves."""

import contextlib
import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from rungs.checkpointing.checkpoint_folder import clean_up, restore, starting_weights
from rungs.checkpointing.manifest import Checkpoint, read_checkpoint
from rungs.checkpointing.saver import Saver
from rungs.checkpointing.start_from import starting_point
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
from rungs.data.provenance import Provenance, refuse_other_tokenizers
from rungs.model.gpt import GPT
from rungs.optim.optimizer import MultiSteps
from rungs.optim.precision import dtype_of, resolved
from rungs.parallel import jax_setup
from rungs.parallel.devices import mesh_of, recorded_of
from rungs.parallel.processes import (
    connect,
    done_by_first,
    is_first,
    is_one_of_several,
    refuse_to_differ,
    said_by_first,
)
from rungs.planning import hardware, oom_advice
from rungs.planning.flops import active_parameters, conventional_flops, parameters
from rungs.planning.memory import at_rest, shown
from rungs.run import metrics
from rungs.run.folder import RunFolder, Start
from rungs.run.metrics import MetricsLog, StepMetrics, Unrecorded
from rungs.step.state import create_model_and_optimizer, shapes_of
from rungs.training.chart_process import ChartDrawer
from rungs.training.failed_step import Capsules
from rungs.training.result_reader import StepReader
from rungs.training.resume import checkpoint_to_resume, put_aside, refuse_changes
from rungs.training.spikes import Health
from rungs.training.trainer import Trainer

EXIT_STOPPED_ELSEWHERE = 128 + signal.SIGTERM
"""Exit code where another process of the run was told to stop."""

log = logging.getLogger("rungs")


class Plan(NamedTuple):
    """What a start goes by, once all that the user could have got wrong has been checked."""

    run: RunFolder
    config: RunConfig
    saved: Checkpoint | None
    """The checkpoint that it goes on from."""
    before: Weights | None
    """The weights that it goes on from; None where they are random."""
    data: TrainingData
    validation: ValidationData | None
    provenance: Provenance

    @property
    def first_step(self) -> int:
        return self.saved.step + 1 if self.saved else 0


def launch(run: RunFolder, config: RunConfig, start: Start, datasets_dir: Path) -> int:
    """Train a run to its end, or until a signal.

    Nothing in the run folder changes before everything that the user could have got wrong has
    been checked.

    Returns:
        The exit code: 0 at the end; 130 or 143 where SIGINT or SIGTERM stopped it, saved.

    Raises:
        UserError: the run, its data and its checkpoints do not fit together.
        RunFailure: it cannot go on, through no mistake of the user's.
    """
    plan = _plan(run, config, start, datasets_dir)
    # 3. A finished run has nothing left to do.
    if plan.saved is not None and plan.first_step >= plan.data.total_steps:
        with disk.writing(run.path, "what is left to do"):
            done_by_first(lambda: _finish_again(run, plan.first_step))
        return 0
    mesh = _mesh(plan)
    config = _with_dtype(plan.config)
    plan = plan._replace(config=config)
    # 5. What this start leaves behind moves aside; what a crash left half-done goes.
    with disk.writing(run.path, "what this start changes"):
        done_by_first(lambda: _tidy(run, plan.saved))
    with run_log.failures_noted(), oom_advice.explained(config, mesh):
        oom_advice.warn_if_too_large(config, mesh)
        return _trained(plan, mesh)


def _plan(run: RunFolder, config: RunConfig, start: Start, datasets_dir: Path) -> Plan:
    # 1. The checkpoint: none with --fresh, the one --from names, else the newest whole one. The
    #    weights before this start are its own or, without one, those that start_from names.
    saved = _saved(run, start)
    if saved is not None:
        recorded = saved.meta.run_config().train.compute_dtype
        config = config._replace(train=resolved(config.train, recorded))
        refuse_changes(saved.meta, config, run, start.extend)
    before = saved.weights if saved else starting_point(run, config)
    # 2. The data: for a run under way the copy at hand, which must be what it was started with.
    datasets = _datasets(config.train, datasets_dir, is_new=saved is None)
    provenance = Provenance.of(config.train, datasets)
    refuse_to_differ("configs and datasets", f"{config} {provenance.datasets}")
    if saved is not None:
        provenance.refuse_other_than(saved.meta.datasets)
    elif before is not None:
        refuse_other_tokenizers(datasets, config.train.tokenizer, before.tokenizer)
    with _mistakes_in(run):
        data = TrainingData(config, datasets)
    validation = ValidationData.of(config, datasets)
    return Plan(run, config, saved, before, data, validation, provenance)


def _mesh(plan: Plan) -> Mesh:
    # 4. The devices: as train.json says, else as the checkpoint recorded, else all there are.
    recorded = plan.saved.meta.sharding if plan.saved else None
    if not is_one_of_several():
        jax_setup.prepare(plan.config.train, recorded)
    with _mistakes_in(plan.run):
        mesh = _mesh_of(plan.config, recorded)
    connect(mesh)
    return mesh


def _with_dtype(config: RunConfig) -> RunConfig:
    """With the type to compute in: of several processes the first one's."""
    dtype = said_by_first(lambda: dtype_of(config.train).name)
    return config._replace(train=config.train.model_copy(update={"compute_dtype": dtype}))


def _trained(plan: Plan, mesh: Mesh) -> int:
    """Take the steps; returns the exit code."""
    drawer = ChartDrawer(plan.run.path)
    trainer = _trainer(plan, mesh, drawer)
    _report_start(plan, recorded_of(plan.config.train, mesh))
    _report_size(plan, trainer, mesh)
    _report_trained(trainer.model, trainer.optimizer)
    # 7. The steps.
    with StopSignal() as stop:
        try:
            last = trainer.train(stop)
        finally:
            drawer.finish()
    is_stopped = last.global_step + 1 < plan.data.total_steps
    done_by_first(lambda: _report_end(plan.run, plan.config, last, is_stopped))
    return (stop.exit_code or EXIT_STOPPED_ELSEWHERE) if is_stopped else 0


def _trainer(plan: Plan, mesh: Mesh, drawer: ChartDrawer) -> Trainer:
    # 6. The weights: those of the checkpoint, those to start from, or fresh ones.
    run, config, saved, before, data, validation, provenance = plan
    model, optimizer = model_and_optimizer(config, data.total_steps, mesh, saved, before)
    steps = _steps_before(run, saved)
    capsules = Capsules(run, config, data, recorded_of(config.train, mesh))
    metrics_log = _metrics_log(run, saved)
    saver = _saver(run, config, provenance, before, metrics_log, drawer)
    return Trainer(
        config=config,
        data=data,
        validation=validation,
        provenance=provenance,
        mesh=mesh,
        model=model,
        optimizer=optimizer,
        first_step=plan.first_step,
        metrics=metrics_log,
        saver=saver,
        reader=StepReader(
            data.tokens_per_step, model, optimizer, Health(config.train, steps), capsules, saver
        ),
        unvalidated=_unvalidated(saved, steps) if saved and validation else None,
        peak_tokens_per_second=_peak_tokens_per_second(config, mesh),
    )


def _saver(
    run: RunFolder,
    config: RunConfig,
    provenance: Provenance,
    before: Weights | None,
    metrics_log: MetricsLog,
    drawer: ChartDrawer,
) -> Saver:
    file = provenance.tokenizer_file
    return Saver(run.checkpoints, config, file, metrics_log.sync, drawer.request, before)


@contextlib.contextmanager
def _mistakes_in(run: RunFolder) -> Iterator[None]:
    """Say in which folder the files are that a message is about."""
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
    before: Weights | None,
) -> tuple[GPT, MultiSteps]:
    """Those of a checkpoint or, where there is none, fresh ones with the weights to start from."""
    if saved is not None:
        return restore(saved, config, total_steps, mesh)
    weights = starting_weights(before, config, total_steps, mesh)
    return create_model_and_optimizer(config, total_steps, mesh, weights)


def _saved(run: RunFolder, start: Start) -> Checkpoint | None:
    """The checkpoint that the first process, on behalf of all, goes on from."""

    def name() -> str:
        found = checkpoint_to_resume(run, start)
        return found.folder.name if found else ""

    told = said_by_first(name)
    return read_checkpoint(run.checkpoints / told) if told else None


def _datasets(train: TrainConfig, datasets_dir: Path, is_new: bool) -> dict[str, Dataset]:
    """Each dataset of a run; the first process builds those that are absent."""

    def open_all(update: bool) -> dict[str, Dataset]:
        return {name: open_dataset(name, datasets_dir, update=update) for name in train.datasets}

    if not is_one_of_several():
        return open_all(is_new)
    done_by_first(lambda: open_all(is_new))
    return open_all(update=False)


def _mesh_of(config: RunConfig, recorded: ShardingConfig | None) -> Mesh:
    try:
        return mesh_of(config.train, config.model, recorded)
    except ValueError as error:
        lines = str(error).splitlines()
        raise UserError("\n".join(f"{_file_of(line)}: {line}" for line in lines)) from None


def _file_of(line: str) -> str:
    """The file of the key that a message begins with."""
    key = re.match(r"\w*", line)
    return MODEL_FILE if key and key[0] in ModelConfig.model_fields else TRAIN_FILE


def _tidy(run: RunFolder, saved: Checkpoint | None) -> None:
    aside = put_aside(run, saved)
    clean_up(run.checkpoints)
    for unfinished in run.unfinished_charts:
        unfinished.unlink(missing_ok=True)
    run_log.keep(run.log)
    if aside is not None:
        log.info("moved aside to %s", aside)


def _steps_before(run: RunFolder, saved: Checkpoint | None) -> list[StepMetrics]:
    """What is recorded of the steps up to the checkpoint."""
    last = saved.step if saved else -1
    return [step for step in metrics.read(run.metrics) if step.global_step <= last]


def _metrics_log(run: RunFolder, saved: Checkpoint | None) -> MetricsLog:
    if not is_first():
        return Unrecorded()
    return MetricsLog(run.metrics, last_step=saved.step if saved else -1)


def _unvalidated(saved: Checkpoint, steps: list[StepMetrics]) -> StepMetrics | None:
    """The step of a checkpoint, where it has no validation loss but should: a signal cut the
    validation short, or the loss was not finite and will be so again."""
    is_due = saved.step % saved.meta.train["checkpoint_interval"] == 0
    if not is_due or saved.meta.selection_loss is not None:
        return None
    return next((step for step in steps if step.global_step == saved.step), None)


def _finish_again(run: RunFolder, steps: int) -> None:
    """What a kill just after the last checkpoint left to do."""
    clean_up(run.checkpoints)
    drawer = ChartDrawer(run.path)
    drawer.request()
    drawer.finish()
    log.info(
        "%s is finished: %s steps; to go on, raise min_train_tokens or epochs and --extend",
        run.path,
        f"{steps:,}",
    )


def _report_start(plan: Plan, sharding: ShardingConfig) -> None:
    saved, before = plan.saved, plan.before
    starts = f"starts from {before.path}" if before else "starts"
    goes_on = f"goes on after step {saved.step:,}, {saved.folder.name}" if saved else starts
    log.info(
        "%s %s: %s steps of %s tokens on %s, in %s",
        plan.run.path,
        goes_on,
        f"{plan.data.total_steps:,}",
        f"{plan.data.tokens_per_step:,}",
        _shown(sharding),
        plan.config.train.compute_dtype,
    )


def _report_size(plan: Plan, trainer: Trainer, mesh: Mesh) -> None:
    """The plan in short: what takes no tracing to know."""
    model, train = plan.config
    shapes = shapes_of(model, train.lora)
    sizes = parameters(shapes), active_parameters(shapes, model)
    total, active = (size.total for size in sizes)
    flops = conventional_flops(shapes, model, plan.config.sequence_length)
    tokens = plan.data.total_steps * plan.data.tokens_per_step
    log.info(
        "%s parameters%s, %s MFLOPs a token; %s tokens, %.3g for each parameter; weights, moments"
        " and gradients take %s of %s on each device; more: uv run plan.py %s",
        f"{total:,}",
        f", of which a token meets {active:,}" if active < total else "",
        f"{flops / 1e6:,.1f}",
        f"{tokens:,}",
        tokens / active,
        shown(at_rest(trainer.model, trainer.optimizer)),
        shown(oom_advice.device_bytes(mesh)),
        plan.run.path,
    )


def _peak_tokens_per_second(config: RunConfig, mesh: Mesh) -> float | None:
    """Of all devices, where they are known."""
    model, train = config
    kind = hardware.of_kind(mesh.devices.flat[0].device_kind)
    peak = kind and kind.peak(dtype_of(train))
    if not peak:
        return None
    length = config.sequence_length
    return mesh.size * peak / conventional_flops(shapes_of(model, train.lora), model, length)


def _shown(sharding: ShardingConfig) -> str:
    """The devices in words."""
    data, tensor = sharding.sizes
    devices = f"{data * tensor} {jax.devices()[0].device_kind} device{'s' * (data * tensor > 1)}"
    if data * tensor > 1:
        devices += f", {sharding.mode}" + f": data {data} × tensor {tensor}" * (tensor > 1)
    processes = jax.process_count()
    return devices + f", {processes} processes" * (processes > 1)


def _report_trained(model: GPT, optimizer: MultiSteps) -> None:
    """Say how much is trained, where that is not all."""
    trained, whole = (
        sum(array.size for array in jax.tree.leaves(nnx.state(model, kind)))
        for kind in (optimizer.wrt, nnx.Param)
    )
    if trained < whole:
        log.info("trains %s of %s parameters", f"{trained:,}", f"{whole:,}")


def _report_end(run: RunFolder, config: RunConfig, last: StepMetrics, is_stopped: bool) -> None:
    steps = metrics.read(run.metrics)
    seconds = sum(step.step_seconds for step in steps)
    best = metrics.best_step(steps, config.train.checkpoint_interval)
    shown = [
        f"{name} {loss:.4f}"
        for name, loss in (
            ("train loss", last.train_loss),
            ("validation loss", last.validation_loss),
        )
        if loss is not None
    ]
    log.info(
        "%s after step %s: %s tokens in %s s, %s tokens/s; %s; best %s",
        "stopped" if is_stopped else "finished",
        f"{last.global_step:,}",
        f"{last.tokens_seen:,}",
        f"{seconds:,.1f}",
        f"{last.tokens_seen / seconds:,.0f}",
        ", ".join(shown),
        f"at step {best.global_step:,}" if best else "none",
    )
    if is_stopped:
        log.info("to go on: uv run train.py %s", run.path)

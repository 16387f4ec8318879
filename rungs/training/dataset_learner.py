"""Training on datasets: batches, validation loss, benchmarks, loss spikes. What a step minimizes is
up to an objective, see `rungs/objectives`; pass one of your own to `on_datasets`."""

import dataclasses
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.checkpointing.load import Start
from rungs.checkpointing.manifest import Checkpoint
from rungs.common.errors import RunFailure, UserError
from rungs.common.shown_text import counted
from rungs.config.run_config import TRAIN_FILE, RunConfig, errors_in_files_of
from rungs.config.train_config import TrainConfig
from rungs.data import catalog
from rungs.data.provenance import Provenance, check_same_tokenizer
from rungs.data.text import tokenizer_files
from rungs.data.text.tokenizer import Tokenizer
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData, ValidationData, ValidationSets
from rungs.inspect.watch import Watch
from rungs.model.remat import layer_loop
from rungs.objectives.next_token import NextToken, PlacedBatch, RunData
from rungs.objectives.table import objective_of
from rungs.parallel import processes, sharding
from rungs.parallel.sharding import Layout
from rungs.planning import advice, forecast
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.run.metrics import Spike, StepMetrics
from rungs.run.step_table import StepTable
from rungs.step.eval_step import (
    Sums,
    ValidationLosses,
    make_evaluation_step,
    validation_loss,
    validation_losses,
)
from rungs.step.state import averaged_model
from rungs.step.train_step import Step, StepResult, make_step
from rungs.training import resume, run_report
from rungs.training.background import Benchmarks
from rungs.training.failed_steps import LossSpikeDetector
from rungs.training.learner import DATA, Kind, Replayed, Stops, record_fields
from rungs.training.start import model_and_optimizer
from rungs.training.trainer import is_validation_step

log = logging.getLogger("rungs")

MakeObjective = Callable[[TrainConfig], NextToken]


@dataclasses.dataclass(frozen=True)
class DatasetInputs:
    """The opened and checked data of a run. See `learner.Inputs`."""

    config: RunConfig
    data: TrainingData
    validation: ValidationSets
    others: dict[str, Dataset]
    """Those of `validation_datasets`."""
    record: Provenance
    benchmarks: Benchmarks | None
    datasets_dir: Path
    objective: NextToken

    metrics: ClassVar = StepMetrics

    @property
    def total_steps(self) -> int:
        return self.data.total_steps

    def edit_to_extend(self, done: int) -> str:
        return resume.edit_to_extend(self.config, self.data, done)

    def learner(self, start: Start, mesh: Mesh, steps: Sequence[StepMetrics]) -> "DatasetLearner":
        return DatasetLearner(self, start, mesh, steps)

    @contextmanager
    def resources(self, start: Start, mesh: Mesh) -> Iterator[None]:
        config, stored = start.config, start.weights.dtypes() if start.weights else None
        if processes.is_first_process() and not start.options.dry_run:
            forecast.warn_if_short(start.run, config, self.total_steps, stored)
        with advice.report_out_of_memory(config, mesh, stored):
            if not start.options.dry_run:
                advice.warn_if_too_large(config, mesh, stored)
            yield


def on_datasets(datasets_dir: Path, make_objective: MakeObjective = objective_of) -> Kind:
    """Return training on datasets in a folder as a kind of run. `make_objective` makes the
    objective for a config."""

    def opened(start: Start, _: ExitStack) -> DatasetInputs:
        return _open(start, datasets_dir, make_objective(start.config.train))

    def replayed(start: Start, mesh: Mesh) -> Replayed:
        objective = make_objective(start.config.train)
        step = make_step(objective, start.config.train, mesh)
        return Replayed(objective, step, objective.array_names)

    return Kind(opened, replayed)


def _open(start: Start, datasets_dir: Path, objective: NextToken) -> DatasetInputs:
    """Open all data of a run, and check that a resumed run's are unchanged. Raises UserError if
    they changed, or don't fit the run."""
    config, saved = start.config, start.saved
    train = config.train
    names = train.datasets, train.validation_datasets
    datasets, others = _open_datasets(names, datasets_dir, update=saved is None)
    record = Provenance.of(train, datasets)
    processes.check_all_agree("configs and datasets", f"{config} {record.datasets}")
    if saved is not None:
        record.check_same_tokens(saved.meta.datasets)
    is_new = saved is None or start.is_branching
    model_tokenizer = start.weights.tokenizer if start.weights and is_new else None
    check_same_tokenizer(datasets | others, train.tokenizer, model_tokenizer)
    with errors_in_files_of(start.run.path):
        if train.watch_interval and processes.is_sending_with_gloo():
            raise UserError(
                f"{TRAIN_FILE}: watch_interval: not with several processes on CPUs, which confuse"
                " the messages of what is measured at once; leave it out, or use one process"
            )
        data = TrainingData(config, datasets)
        validation = ValidationSets.of(config, datasets, others)
        if train.stop_after and validation.own is None:
            raise UserError(f"{TRAIN_FILE}: stop_after: needs a dataset with a validation split")
    objective.open(start, data, datasets_dir)
    return DatasetInputs(
        config=config,
        data=data,
        validation=validation,
        others=others,
        record=record,
        benchmarks=Benchmarks.of(start.run, train, record.tokenizer_place),
        datasets_dir=datasets_dir,
        objective=objective,
    )


def _open_datasets(
    names: Iterable[Iterable[str]], datasets_dir: Path, update: bool
) -> list[dict[str, Dataset]]:
    """Open groups of datasets; the first process builds missing ones."""

    def open_all(update: bool) -> list[dict[str, Dataset]]:
        return [catalog.open_datasets(group, datasets_dir, update=update) for group in names]

    if not processes.is_multi_process():
        return open_all(update)
    processes.run_on_first(lambda: open_all(update))
    return open_all(update=False)


class DatasetLearner:
    """Takes the steps of a run on batches of its data. See `learner.Learner`."""

    reads_late = True

    def __init__(
        self, inputs: DatasetInputs, start: Start, mesh: Mesh, steps: Sequence[StepMetrics]
    ) -> None:
        config: RunConfig = start.config
        self._inputs, self._train, self._mesh = inputs, config.train, mesh
        self._start, self._objective = start, inputs.objective
        data = RunData(inputs.data, inputs.validation, inputs.others)
        self._objective.prepare(start, mesh, data)
        self.model, self.optimizer = model_and_optimizer(start, inputs.total_steps, mesh)
        file = inputs.record.tokenizer_file
        self._tokenizer: Tokenizer | None = tokenizer_files.load_tokenizer(file) if file else None
        self._validation_data = inputs.record.validation_data(config.train)
        checksums = inputs.record.datasets | self._objective.record
        self.record = inputs.record._replace(datasets=checksums)
        self.peak_tokens_per_second = run_report.peak_tokens_per_second(config, mesh)
        self._step: Step = make_step(self._objective, config.train, mesh)
        self._watch = Watch(start.run, config, self._objective, mesh)
        self._evaluation_step = make_evaluation_step(self._objective, config.train, mesh)
        self._spikes = LossSpikeDetector(steps)
        size = config.train.microbatch_size
        rows = sharding.process_local_rows(mesh, size)
        batches = inputs.data.batches(start.first_step, rows)
        self._batches = PrefetchedBatches(mesh, batches, size)
        self._next_batch = iter(self._batches)
        self._last_read = time.perf_counter()

    @property
    def failure(self) -> RunFailure | None:
        return self._batches.failure

    def take(self, step: int, _: Stops, learning_rate: np.float32 | None) -> StepResult:
        limit = self._spikes.loss_limit(step) if self._train.skip_spikes else None
        with jax.profiler.TraceAnnotation(DATA):
            batch = self._objective.arrays(next(self._next_batch))
        scalars = self._scalars(limit, learning_rate)
        with jax.transfer_guard("disallow"):
            if not self._start.options.dry_run:
                self._watch.begin(step, self.model, self.optimizer, *batch, **scalars)
            return self._step(self.model, self.optimizer, *batch, **scalars)

    def _scalars(
        self, loss_limit: float | None, learning_rate: np.float32 | None
    ) -> dict[str, jax.Array]:
        """Return the step's optional arguments, on all devices."""
        given = {"loss_limit": loss_limit, "learning_rate": learning_rate}
        everywhere = NamedSharding(self._mesh, PartitionSpec())

        def placed(number: float | np.float32) -> jax.Array:
            return jax.make_array_from_callback((), everywhere, lambda _: np.float32(number))

        return {name: placed(number) for name, number in given.items() if number is not None}

    def read(self, step: int, taken: StepResult) -> tuple[StepMetrics, StepResult]:
        result = StepResult(*jax.device_get(tuple(taken)))
        now = time.perf_counter()
        seconds, self._last_read = now - self._last_read, now
        routing = result.routing
        before, seen = map(self._start.config.tokens_before, (step, step + 1))
        read = StepMetrics(
            **record_fields(self._start, step, result, seen, seen - before, seconds),
            dataset_tokens=self._inputs.data.dataset_tokens(step + 1) or None,
            load_balancing_loss=float(routing.balance_loss) if routing else None,
            expert_tokens=routing.counts_E.tolist() if routing else None,
            spike=self._spike(step, result.trained_loss, bool(result.skipped)),
            layer_warning=self._watch.end(step),
            **self._objective.figures(result.outputs_ABS, result.finite_A),
        )
        self._spikes.add(read)
        return read, result

    def _spike(self, step: int, loss: float | None, is_skipped: bool) -> Spike | None:
        """Return whether the step is a loss spike, and warn if so. A non-finite loss is none."""
        if loss is None:
            return None
        limit = self._spikes.loss_limit(step)
        if is_skipped:
            action = "skipped: weights and optimizer state are as before"
        elif loss > limit:
            action = 'update applied; "skip_spikes": true skips such steps'
        else:
            return None
        log.warning("step %d: loss spike, %.4g is above %.4g; %s", step, loss, limit, action)
        return "skipped" if is_skipped else "seen"

    def validate(self, metrics: StepMetrics, stops: Stops) -> StepMetrics:
        sets, step = self._inputs.validation, metrics.global_step
        if not sets:
            return metrics
        figures: dict[str, Any] = {}

        def measure(data: ValidationData, sums: Sums) -> Sums:
            if data is sets.own:
                figures.update(self._objective.validation_figures(data, sums))
            return self._objective.measure(data, sums)

        losses = validation_losses(
            self.model, self._evaluation_step, sets, self._mesh, stops.anywhere, measure
        )
        losses = _finite(step, losses)
        bits_per_byte = None
        if losses.mean is not None and self._bits_per_nat is not None:
            bits_per_byte = losses.mean * self._bits_per_nat
        return dataclasses.replace(
            metrics,
            validation_loss=losses.mean,
            ema_validation_loss=self._averages_loss(stops),
            bits_per_byte=bits_per_byte,
            validation_losses=losses.by_dataset or None,
            validation_data=None if losses.mean is None else self._validation_data,
            **figures,
        )

    def _averages_loss(self, stops: Stops) -> float | None:
        own, layout = self._inputs.validation.own, Layout.of(self._train.sharding, self._mesh)
        if self.optimizer.ema is None or own is None:
            return None
        averaged = averaged_model(self.model, self.optimizer, layout)
        step, measure = self._evaluation_step, self._objective.measure
        loss, _ = validation_loss(averaged, step, own, self._mesh, stops.anywhere, measure)
        return loss if math.isfinite(loss) else None

    @functools.cached_property
    def _bits_per_nat(self) -> float | None:
        """Bits per byte of validation text at a loss of one nat per token, or None."""
        own, is_cross_entropy = self._inputs.validation.own, self._objective.validates_cross_entropy
        if self._tokenizer is None or own is None or not is_cross_entropy:
            return None
        if not processes.is_first_process():
            return None
        tokens, text_bytes = own.count_bytes(self._tokenizer)
        return tokens / text_bytes / math.log(2) if text_bytes else None

    def lacks_validation(self, saved: Checkpoint, metrics: StepMetrics) -> bool:
        """Whether a signal interrupted it, or the loss was not finite, as it will be again."""
        is_missing = metrics.validation_loss is None and saved.meta.selection_loss is None
        has_own = self._inputs.validation.own is not None
        return has_own and is_missing and is_validation_step(self._train, saved.step)

    def losses(self, metrics: StepMetrics) -> tuple[float | None, float | None]:
        has_own = self._inputs.validation.own is not None
        validation_loss = metrics.validation_loss
        return validation_loss, validation_loss if has_own else metrics.train_loss

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        arrays: Any = self._inputs.data.batch(step)
        if self._objective.adds_arrays:
            arrays = jax.device_get(self._complete_batch(step))
        named = zip(self._objective.array_names, arrays, strict=True)
        return {name: array for name, array in named if array is not None}

    def _complete_batch(self, step: int) -> PlacedBatch:
        """Return the batch of any step."""
        return self._objective.arrays(
            sharding.place_batch(self._mesh, *self._inputs.data.batch(step))
        )

    def retake(self, step: int, learning_rate: np.float32 | None, *, skipped: bool) -> StepResult:
        arguments, scalars = self._repeated(step, learning_rate, skipped)
        return self._step(*arguments, **scalars)

    def program(self, step: int, learning_rate: np.float32 | None) -> str:
        """Return the compiled program of a step, as HLO text."""
        arguments, scalars = self._repeated(step, learning_rate)
        lowered = self._step.lower(*arguments, **scalars)  # type: ignore[attr-defined]
        return str(lowered.compile().compiled.as_text())

    def _repeated(
        self, step: int, learning_rate: np.float32 | None, skipped: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, jax.Array]]:
        """Return the arguments of a step that is not the next one of the data."""
        limit = (-np.inf if skipped else np.inf) if self._train.skip_spikes else None
        arguments = self.model, self.optimizer, *self._complete_batch(step)
        return arguments, self._scalars(limit, learning_rate)

    @staticmethod
    def headline(steps: Sequence[StepMetrics]) -> dict[str, str]:
        """Return the mean loss of the steps that have one, and the last validation loss."""
        finite = [step.train_loss for step in steps if step.train_loss is not None]
        shown = {"loss": f"{sum(finite) / len(finite):.4f}" if finite else "none"}
        for step in steps:
            if step.validation_loss is not None:
                when = run_report.when_measured(step, steps[-1])
                shown["validation loss"] = f"{step.validation_loss:.4f}{when}"
        return shown

    def log_start(self, start: Start, mesh: Mesh) -> None:
        inputs, config = self._inputs, start.config
        first, most = config.tokens_per_step, config.most_tokens_per_step
        size = f"{first:,} to " * (most > first) + counted(most, "token")
        loop = ""
        if config.model.n_layers:
            remat, unroll = layer_loop(config.train, config.model)
            loop = f", remat {remat}, scan_unroll {unroll}"
        run_report.log_start(start, mesh, inputs.total_steps, size, loop)
        if shortage := config.train.shortage(inputs.total_steps):
            log.warning("%s: %s", start.run.path / config.train_file, shortage)
        if start.saved is not None:
            before = start.saved.meta.validation_data
            run_report.log_validation_change(before, self._validation_data)
        elif processes.is_first_process():  # not for a resumed run, which must keep its keys
            run_report.warn_of_unused_keys(start.run, config, bool(inputs.validation))
        run_report.log_size(start.run, config, inputs.data, self.model, self.optimizer, mesh)
        run_report.log_data(config, inputs.data, self._tokenizer)
        run_report.warn_of_devices(config.train, mesh)

    def summary(self, run: RunFolder, last: StepMetrics | None) -> str:
        steps = StepTable.read(run.metrics)
        last = last or metrics.read(run.metrics)[-1]
        seconds, best = steps.seconds[-1], steps.best(self._train.checkpoint_interval)
        losses = {"train loss": last.train_loss, "validation loss": last.validation_loss}
        losses["validation loss of the average"] = last.ema_validation_loss
        parts = (
            f"{last.tokens_seen:,} tokens in {seconds:,.1f} s,"
            f" {last.tokens_seen / seconds:,.0f} tokens/s",
            ", ".join(f"{k} {loss:.4f}" for k, loss in losses.items() if loss is not None),
            f"best {f'at step {best.step:,}' if best else 'none'}",
        )
        return "; ".join(filter(None, parts))


def _finite(step: int, losses: ValidationLosses) -> ValidationLosses:
    """Return the finite validation losses, with a warning about the others."""
    finite = {name: loss for name, loss in losses.by_dataset.items() if math.isfinite(loss)}
    for name in losses.by_dataset.keys() - finite:
        log.warning("step %d: the validation loss on %s is not finite", step, name)
    mean = losses.mean
    if mean is not None and not math.isfinite(mean):
        log.warning("step %d: the validation loss is not finite", step)
        mean = None
    return ValidationLosses(mean, finite)


class PrefetchedBatches:
    """Batches of host arrays on the devices of a mesh; the next one is transferred while one is
    used. `size` is the sequences of a microbatch over all devices."""

    def __init__(
        self, mesh: Mesh, batches: Iterable[tuple[np.ndarray | None, ...]], size: int
    ) -> None:
        self._mesh, self._batches, self._size = mesh, batches, size
        self.failure: RunFailure | None = None
        """Why no further batch could be read, or None."""

    def __iter__(self) -> Iterator[PlacedBatch]:
        following: PlacedBatch | None = None
        for batch in self._readable():
            following, ready = sharding.place_batch(self._mesh, *batch, size=self._size), following
            if ready is not None:
                yield ready
        if following is not None:
            yield following
        if self.failure is not None:
            raise self.failure

    def _readable(self) -> Iterator[tuple[np.ndarray | None, ...]]:
        try:
            yield from self._batches
        except RunFailure as failure:
            self.failure = failure

"""The training loop of a run: steps, validation, metrics and checkpoints.

The compiled step comes from `rungs/step`: `make_train_step` for the config and mesh, called with
model, optimizer and a batch of token ids. Another loop, such as reinforcement learning that
generates its own batches, is a file beside this one that calls the same step.
"""

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.checkpointing.checkpoint_folder import utc_now
from rungs.checkpointing.manifest import CheckpointMeta, installed_versions
from rungs.checkpointing.saver import Saver
from rungs.common.errors import RunFailure
from rungs.common.signals import StopSignal
from rungs.config.run_config import RunConfig
from rungs.data.loader import TrainingData, ValidationSets
from rungs.data.provenance import Provenance
from rungs.data.tokenizer import Tokenizer
from rungs.model.gpt import GPT
from rungs.optim.multi_steps import MultiSteps
from rungs.parallel import numerics
from rungs.parallel.devices import recorded_sharding
from rungs.parallel.processes import AnyProcess, is_first_process
from rungs.parallel.sharding import place_batch, process_local_rows
from rungs.run.metrics import MetricsLog, StepMetrics
from rungs.step.eval_step import (
    ValidationInterrupted,
    ValidationLosses,
    make_evaluation_step,
    validation_losses,
)
from rungs.step.nonfinite import Flags
from rungs.step.train_step import StepResult, make_train_step
from rungs.training.benchmarks import Benchmarks
from rungs.training.intervals import Due, Intervals
from rungs.training.progress import Progress, losses
from rungs.training.result_reader import ResultReader

log = logging.getLogger("rungs")

Batch = tuple[jax.Array | None, ...]


@dataclasses.dataclass
class Trainer:
    """Takes a run's steps, from `first_step` to the last one of the data."""

    config: RunConfig
    data: TrainingData
    validation: ValidationSets
    provenance: Provenance
    mesh: Mesh
    model: GPT
    optimizer: MultiSteps
    first_step: int
    metrics: MetricsLog
    saver: Saver
    reader: ResultReader
    unvalidated: StepMetrics | None = None
    """The step before `first_step`, if a signal interrupted its validation."""
    tokenizer: Tokenizer | None = None
    """Of the dataset, if it has one."""
    benchmarks: Benchmarks | None = None
    unmeasured: int | None = None
    """The step before `first_step`, if a kill or a signal interrupted its benchmarks."""
    peak_tokens_per_second: float | None = None
    """What all devices could do at their peak FLOPS, if that is known."""

    def __post_init__(self) -> None:
        self._train_step = make_train_step(self.config.train, self.mesh)
        self._evaluation_step = make_evaluation_step(self.config.train, self.mesh)
        self._saved: tuple[int, Flags] | None = None

    def train(self, stop: StopSignal) -> StepMetrics:
        """Take the remaining steps, or those until `stop`; the last one is saved. Until the first
        one is compiled there is nothing to save, and a signal ends the process.

        The host reads a step's results while the next step runs on the devices.

        Args:
            stop: tells when a signal has arrived.

        Returns:
            The metrics of the last step taken.
        """
        steps = range(self.first_step, self.data.total_steps)
        size = self.config.train.microbatch_size
        rows = process_local_rows(self.mesh, size)
        batches = PrefetchedBatches(self.mesh, self.data.batches(self.first_step, rows), size)
        any_process = AnyProcess(self.mesh)
        intervals = Intervals(self.config.train, self.data.total_steps, any_process)

        def is_stop_wanted() -> bool:
            return any_process(stop.number is not None or batches.failure is not None)

        progress = Progress(steps, losses, self.peak_tokens_per_second)
        with progress, self.metrics, self.saver:
            if self.unvalidated is not None:
                self._validate_late(self.unvalidated)
            if self.unmeasured is not None:
                self._measure(self.unmeasured, _never)
            unread: tuple[int, StepResult] | None = None
            for step, batch in zip(steps, batches, strict=True):
                limit = self._loss_limit(step)
                with jax.transfer_guard("disallow"):
                    result = self._train_step(self.model, self.optimizer, *batch, **limit)
                stop.begin()
                self._check_saved_state()
                if unread is not None:
                    self._record(self.reader.read(*unread), progress)
                unread = step, result
                stopping, due = is_stop_wanted(), intervals.after(step)
                if due.anything or stopping:
                    due = due._replace(checkpoint=due.checkpoint or stopping)
                    latest, is_interrupted = self._finish_step(
                        step, result, progress, is_stop_wanted, due
                    )
                    stopping, unread = stopping or is_interrupted, None
                if stopping:
                    break
                self.saver.raise_failure()
            self._check_saved_state()
        if batches.failure is not None:
            raise batches.failure
        return latest

    def _loss_limit(self, step: int) -> dict[str, jax.Array]:
        """Return the step's extra argument: the loss above which it skips, if it skips spikes."""
        if not self.config.train.skip_spikes:
            return {}
        limit = np.float32(self.reader.spikes.loss_limit(step))
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        return {"loss_limit": jax.make_array_from_callback((), everywhere, lambda _: limit)}

    def _finish_step(
        self,
        step: int,
        result: StepResult,
        progress: Progress[StepMetrics],
        is_stop_wanted: Callable[[], bool],
        due: Due,
    ) -> tuple[StepMetrics, bool]:
        """Validate if that is due, then record the step and save a checkpoint if that is due.

        Returns:
            The step's metrics, and whether its validation was interrupted. The next start then
            repeats it; as no start follows the last step, its validation is never interrupted.
        """
        metrics = self.reader.read(step, result)
        is_last = step == self.data.total_steps - 1
        should_stop = _never if is_last else is_stop_wanted
        is_interrupted = False
        if due.validation and self.validation:
            try:
                metrics = self._with_validation(metrics, self._validate(step, should_stop))
            except ValidationInterrupted:
                is_interrupted = True
        self._record(metrics, progress)
        if due.checkpoint or is_interrupted:
            self._save(metrics, due.competes and not is_interrupted)
        if self.benchmarks is not None and due.competes and self.benchmarks.is_due(step, is_last):
            is_interrupted |= self._measure(step, should_stop)
        return metrics, is_interrupted

    def _measure(self, step: int, should_stop: Callable[[], bool]) -> bool:
        """Measure the checkpoint of a step on the benchmarks; return whether it was interrupted.
        The next start then repeats it."""
        assert self.benchmarks is not None
        self.saver.wait()
        return self.benchmarks.measure(step, should_stop)

    def _save(self, metrics: StepMetrics, due: bool) -> None:
        """Start saving a checkpoint, and computing whether its arrays are finite."""
        flags = self.saver.save(self.model, self.optimizer, self._meta(metrics, due))
        self._saved = metrics.global_step, flags

    def _check_saved_state(self) -> None:
        """Raise RunFailure if an array of the last checkpoint was not finite."""
        if self._saved is not None:
            self.reader.check_state(*self._saved)
            self._saved = None

    def _validate_late(self, metrics: StepMetrics) -> None:
        """Validate a step that was saved without its validation loss, and save it again with it."""
        losses = self._validate(metrics.global_step, _never)
        if losses.mean is not None:
            metrics = self._with_validation(metrics, losses)
            self.metrics.replace_last(metrics)
            at_interval = metrics.global_step % self.config.train.checkpoint_interval == 0
            self._save(metrics, due=at_interval)

    def _validate(self, step: int, should_stop: Callable[[], bool]) -> ValidationLosses:
        """Return the validation losses that are finite. Raises ValidationInterrupted."""
        parts = self.model, self._evaluation_step, self.validation, self.mesh
        mean, by_dataset = validation_losses(*parts, should_stop)
        finite = {name: loss for name, loss in by_dataset.items() if math.isfinite(loss)}
        for name in by_dataset.keys() - finite:
            log.warning("step %d: the validation loss on %s is not finite", step, name)
        if mean is not None and not math.isfinite(mean):
            log.warning("step %d: the validation loss is not finite", step)
            mean = None
        return ValidationLosses(mean, finite)

    def _with_validation(self, metrics: StepMetrics, losses: ValidationLosses) -> StepMetrics:
        data = self.provenance.validation_data(self.config.train)
        return dataclasses.replace(
            metrics,
            validation_loss=losses.mean,
            bits_per_byte=self._bits_per_byte(losses.mean),
            validation_losses=losses.by_dataset or None,
            validation_data=None if losses.mean is None else data,
        )

    def _bits_per_byte(self, loss: float | None) -> float | None:
        return None if loss is None or self._bits_per_nat is None else loss * self._bits_per_nat

    @functools.cached_property
    def _bits_per_nat(self) -> float | None:
        """Bits per byte of validation text at a loss of one nat per token, None if not known."""
        if self.tokenizer is None or self.validation.own is None or not is_first_process():
            return None
        tokens, text_bytes = self.validation.own.count_bytes(self.tokenizer)
        return tokens / text_bytes / math.log(2) if text_bytes else None

    def _record(self, metrics: StepMetrics, progress: Progress[StepMetrics]) -> None:
        """Write a step's metrics to metrics.jsonl and show them."""
        self.metrics.append(metrics)
        if metrics.train_loss is None:
            self.reader.check_failed_step(metrics.global_step, self.model)
        progress.show(metrics)

    def _meta(self, metrics: StepMetrics, due: bool) -> CheckpointMeta:
        has_own = self.validation.own is not None
        loss = metrics.validation_loss if has_own else metrics.train_loss
        return CheckpointMeta(
            global_step=metrics.global_step,
            total_steps=self.data.total_steps,
            tokens_seen=metrics.tokens_seen,
            train_loss=metrics.train_loss,
            validation_loss=metrics.validation_loss,
            selection_loss=loss if due else None,
            model=self.config.model.as_json(),
            train=self.config.train.as_json(),
            datasets=self.provenance.datasets,
            tokenizer=self.provenance.tokenizer,
            sharding=recorded_sharding(self.config.train, self.mesh),
            created=utc_now().isoformat(),
            versions=installed_versions(),
            environment=numerics.recorded(),
            checksums={},
        )


def _never() -> bool:
    return False


class PrefetchedBatches:
    """Batches on their devices; the next one is transferred while one is used.

    Args:
        mesh: the devices.
        batches: arrays on the host.
        size: sequences of a microbatch, over all devices.

    Attributes:
        failure: why no batch after the last one could be read, None so far.
    """

    def __init__(
        self, mesh: Mesh, batches: Iterable[tuple[np.ndarray | None, ...]], size: int
    ) -> None:
        self._mesh, self._batches, self._size = mesh, batches, size
        self.failure: RunFailure | None = None

    def __iter__(self) -> Iterator[Batch]:
        following: Batch | None = None
        for batch in self._readable():
            following, ready = place_batch(self._mesh, *batch, size=self._size), following
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

"""The training loop: steps, validation, metrics and checkpoints of one run."""

import dataclasses
import logging
import math
import time
from collections.abc import Iterable, Iterator

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from checkpoint import CheckpointMeta, installed_versions
from checkpointing import Saver, utc_now
from config import RunConfig
from data import TrainingData, ValidationData
from devices import recorded_of
from errors import RunFailure
from evaluation import make_evaluation_step, mean_loss
from hosts import AnyHost, is_first
from logs import TERMINAL
from metrics import MetricsLog, StepMetrics
from model import GPT
from optimizer import MultiSteps
from provenance import Provenance
from sharding import own_rows, place_batch
from signals import StopSignal
from step import StepResult, make_train_step

log = logging.getLogger("rungs")

Batch = tuple[jax.Array, ...]


@dataclasses.dataclass
class Trainer:
    """Everything a run needs to take its steps, from `first_step` to the data's last."""

    config: RunConfig
    data: TrainingData
    validation: ValidationData | None
    provenance: Provenance
    mesh: Mesh
    model: GPT
    optimizer: MultiSteps
    first_step: int
    metrics: MetricsLog
    saver: Saver

    def __post_init__(self) -> None:
        self._train_step = make_train_step(self.config.train, self.mesh)
        self._evaluation_step = make_evaluation_step(self.config.train, self.mesh)
        self._clock = Clock()

    def train(self, stop: StopSignal) -> StepMetrics:
        """Take the steps that are left, or those until `stop`; all is saved at the end.

        The host reads a step's results while the next one runs.

        Returns:
            The metrics of the last step taken.
        """
        steps = range(self.first_step, self.data.total_steps)
        size = self.config.train.microbatch_size
        rows = own_rows(self.mesh, size)
        batches = PlacedAhead(self.mesh, self.data.batches(self.first_step, rows), size)
        is_stop_wanted = AnyHost(self.mesh)
        with self._bar(steps) as bar, self.saver, self.metrics:
            unread: tuple[int, StepResult] | None = None
            for step, batch in zip(steps, batches, strict=True):
                with jax.transfer_guard("disallow"):
                    result = self._train_step(self.model, self.optimizer, *batch)
                if unread is not None:
                    self._record(self._read(*unread), bar)
                unread = step, result
                ends_early = stop.number is not None or batches.failure is not None
                stopping = is_stop_wanted(ends_early)
                if self._is_due(step) or stopping:
                    latest = self._finish_step(step, result, bar)
                    unread = None
                if stopping:
                    break
                self.saver.raise_failure()
        if batches.failure is not None:
            raise batches.failure
        return latest

    def _is_due(self, step: int) -> bool:
        last = self.data.total_steps - 1
        return step % self.config.train.checkpoint_interval == 0 or step == last

    def _finish_step(self, step: int, result: StepResult, bar: tqdm) -> StepMetrics:
        """Validate where that is due, then record the step and save a checkpoint of it."""
        metrics = self._read(step, result)
        due = self._is_due(step)
        if due and self.validation is not None:
            metrics = dataclasses.replace(metrics, validation_loss=self._validate(step))
        self._record(metrics, bar)
        self.metrics.sync()
        self.saver.save(self.model, self.optimizer, self._meta(metrics, due))
        return metrics

    def _validate(self, step: int) -> float | None:
        """The validation loss; None where it is not finite."""
        assert self.validation is not None
        loss = mean_loss(self.model, self._evaluation_step, self.validation, self.mesh)
        if math.isfinite(loss):
            return loss
        log.warning("step %d: the validation loss is not finite", step)
        return None

    def _read(self, step: int, result: StepResult) -> StepMetrics:
        """The step's results on the host, once it is complete."""
        values = StepResult(*jax.device_get(tuple(result)))
        seconds = self._clock.lap()
        finite, routing = values.finite_A, values.routing
        losses = values.losses_A[finite].astype(np.float64)
        tokens = self.data.tokens_per_step
        return StepMetrics(
            global_step=step,
            tokens_seen=(step + 1) * tokens,
            train_loss=float(np.average(losses, weights=values.weights_A[finite]))
            if finite.any()
            else None,
            learning_rate=float(values.learning_rate),
            gradient_norm=float(values.gradient_norm),
            clipped=bool(values.clipped),
            dropped_microbatches=int((~finite).sum()),
            step_seconds=seconds,
            tokens_per_second=tokens / seconds,
            load_balancing_loss=float(routing.balance_loss) if routing else None,
            expert_tokens=routing.counts_E.tolist() if routing else None,
        )

    def _record(self, metrics: StepMetrics, bar: tqdm) -> None:
        self.metrics.append(metrics)
        if dropped := metrics.dropped_microbatches:
            log.warning(
                "step %d: %d microbatches with a loss or gradient that is not finite, left out",
                metrics.global_step,
                dropped,
            )
        loss = "none" if metrics.train_loss is None else f"{metrics.train_loss:.4f}"
        shown = {"loss": loss, "lr": f"{metrics.learning_rate:.2e}"}
        if metrics.validation_loss is not None:
            shown["validation"] = f"{metrics.validation_loss:.4f}"
        bar.set_postfix({**shown, "tok/s": f"{metrics.tokens_per_second:,.0f}"}, refresh=False)
        bar.update()

    def _meta(self, metrics: StepMetrics, due: bool) -> CheckpointMeta:
        loss = metrics.train_loss if self.validation is None else metrics.validation_loss
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
            sharding=recorded_of(self.config.train, self.mesh),
            created=utc_now().isoformat(),
            versions=installed_versions(),
            checksums={},
        )

    def _bar(self, steps: range) -> tqdm:
        seconds_between = 0.1 if TERMINAL.isatty() else 30
        return tqdm(
            file=TERMINAL,
            total=steps.stop,
            initial=steps.start,
            unit="step",
            mininterval=seconds_between,
            dynamic_ncols=True,
            disable=not is_first(),
        )


class Clock:
    """Seconds from one completed step to the next, stalls included."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


class PlacedAhead:
    """The batches on their devices, the next one on its way while one is used.

    Args:
        size: sequences of a microbatch, over all devices.

    Attributes:
        failure: why the batch given last is the last that could be read; None while more can.
    """

    def __init__(self, mesh: Mesh, batches: Iterable[tuple[np.ndarray, ...]], size: int) -> None:
        self._mesh, self._batches, self._size = mesh, batches, size
        self.failure: RunFailure | None = None

    def __iter__(self) -> Iterator[Batch]:
        ahead: Batch | None = None
        for batch in self._readable():
            ahead, ready = place_batch(self._mesh, *batch, size=self._size), ahead
            if ready is not None:
                yield ready
        if ahead is not None:
            yield ahead
        if self.failure is not None:
            raise self.failure

    def _readable(self) -> Iterator[tuple[np.ndarray, ...]]:
        try:
            yield from self._batches
        except RunFailure as failure:
            self.failure = failure

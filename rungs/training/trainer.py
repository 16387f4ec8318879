"""The training loop of every run: steps of its `Learner`, validation, metrics and checkpoints."""

import dataclasses
import itertools
import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple

from jax.sharding import Mesh

from rungs.checkpointing.load import Start
from rungs.checkpointing.saver import Saver, describe_checkpoint
from rungs.common.shown_text import counted
from rungs.common.signals import Interrupted, StopSignal
from rungs.config.optimization_config import OptimizationConfig
from rungs.config.train_config import TrainConfig
from rungs.parallel.processes import AnyProcess
from rungs.run.metrics import MetricsLog, R, StepMetrics, StepRecord
from rungs.step.nonfinite import Flags
from rungs.training.background import Benchmarks
from rungs.training.failed_steps import FailedSteps
from rungs.training.learner import NEVER, Learner, Stops, never
from rungs.training.run_length import RunLength
from rungs.training.run_report import Progress

log = logging.getLogger("rungs")


class Due(NamedTuple):
    """What is due after a step."""

    checkpoint: bool
    validation: bool
    competes: bool
    """Whether the checkpoint may become the best: only at an interval of steps, as others, due by
    time or a signal, differ between starts."""


class Intervals:
    """Counts steps from 0 and minutes from the start of this process. `any_process` tells whether a
    condition holds in any process, so that all agree on the time."""

    def __init__(self, train: OptimizationConfig, any_process: Callable[[bool], bool]) -> None:
        self._train, self._any_process = train, any_process
        self._saved_at = self._validated_at = time.monotonic()
        self._more_checkpoints = train.more_checkpoints if isinstance(train, TrainConfig) else set()

    def after(self, step: int, is_last: bool) -> Due:
        """Return what is due after a step; after a run's last one, everything is."""
        train, now = self._train, time.monotonic()
        competes = is_last or step % train.checkpoint_interval == 0
        checkpoint = competes or step in self._more_checkpoints
        validation = is_last or is_validation_step(train, step)
        if isinstance(train, TrainConfig):
            checkpoint |= self._is_over(train.checkpoint_minutes, self._saved_at)
            validation |= self._is_over(train.validation_minutes, self._validated_at)
        self._saved_at = now if checkpoint else self._saved_at
        self._validated_at = now if validation else self._validated_at
        return Due(checkpoint, validation, competes)

    def _is_over(self, minutes: float | None, since: float) -> bool:
        return minutes is not None and self._any_process(time.monotonic() - since > 60 * minutes)


def is_validation_step(train: OptimizationConfig, step: int) -> bool:
    """Whether a validation is due after a step because of its number."""
    interval = train.validation_interval if isinstance(train, TrainConfig) else None
    return step % (interval or train.checkpoint_interval) == 0


class EarlyStop:
    """Counts the validations in a row without a loss below the lowest so far, for `stop_after`; not
    those due by time, as they differ between starts. `before` are the earlier steps, in order."""

    def __init__(self, train: OptimizationConfig, before: Sequence[StepRecord]) -> None:
        self._train = train
        self._best: StepMetrics | None = None
        self._count = 0
        self.reason: str | None = None
        """Why the run ended early, None if it didn't."""
        for step in before:
            self.count(step)

    def count(self, step: StepRecord) -> int | None:
        """Count a step's validation, if it has one. Return the number of validations if it ends the
        run."""
        limit = self._train.stop_after if isinstance(self._train, TrainConfig) else None
        if limit is None or not isinstance(step, StepMetrics) or step.validation_loss is None:
            return None
        if not is_validation_step(self._train, step.global_step):
            return None
        best, self._count = self._best, self._count + 1
        is_comparable = best is not None and best.validation_data == step.validation_data
        if best is None or not is_comparable or step.validation_loss < (best.validation_loss or 0):
            self._best, self._count = step, 0
            return None
        return self._count if self._count >= limit else None

    def end(self, step: int) -> None:
        """Record and log that the run ends after a step."""
        assert self._best is not None
        self.reason = (
            f"no lower validation loss in {counted(self._count, 'validation')} than"
            f" {self._best.validation_loss:.4f} at step {self._best.global_step:,}"
        )
        log.info("step %s: the run ends early: %s", f"{step:,}", self.reason)


class IntervalLosses:
    """The finite losses of the steps since the last checkpoint at the interval, for `meta.json`;
    not since those due by time or a signal, as they differ between starts. `before` are the earlier
    steps, in order."""

    def __init__(self, interval: int, before: Sequence[StepRecord]) -> None:
        self._interval, self._losses = interval, list[float]()
        for step in before:
            self.add(step)

    def add(self, step: StepRecord) -> None:
        if (step.global_step - 1) % self._interval == 0:
            self._losses.clear()
        if step.train_loss is not None:
            self._losses.append(step.train_loss)

    def summary(self) -> dict[str, Any]:
        """Return the keys of `meta.json`, none without a loss."""
        if not self._losses:
            return {}
        mean = math.fsum(self._losses) / len(self._losses)
        least, most = min(self._losses), max(self._losses)
        return {"min_train_loss": least, "max_train_loss": most, "avg_train_loss": mean}


@dataclasses.dataclass
class Trainer(Generic[R]):
    """Takes a run's steps, from the first one of a start to the last one."""

    start: Start
    mesh: Mesh
    length: RunLength
    learner: Learner[R]
    metrics: MetricsLog[R]
    saver: Saver
    failed_steps: FailedSteps
    early_stop: EarlyStop
    losses: IntervalLosses
    benchmarks: Benchmarks | None
    unvalidated: R | None = None
    """The step before this start, if a signal interrupted its validation."""

    def __post_init__(self) -> None:
        self._saved: tuple[int, Flags] | None = None
        self._last_saved = -1
        self._latest: R | None = None
        self._validation_seconds = 0.0
        self._stopped_after: int | None = None

    @property
    def total_steps(self) -> int:
        return self.length.total_steps

    def train(self, stop: StopSignal) -> R | None:
        """Take the remaining steps, or stop at a signal; the last one taken is saved. Return its
        metrics, None if there is none. Until the first step is compiled there is nothing to save,
        and a signal ends the process.

        The host reads a step's results while the next step runs on the devices."""
        learner, any_process = self.learner, AnyProcess(self.mesh)

        def is_stopping() -> bool:
            return stop.number is not None or learner.failure is not None

        stops = Stops(is_stopping, lambda: any_process(is_stopping()))
        intervals, first = Intervals(self.start.config.train, any_process), self.start.first_step
        peak = learner.peak_tokens_per_second
        progress = Progress(first, self.length, learner.headline, peak)
        with progress, self.metrics, self.saver:
            if self.unvalidated is not None:
                self._validate_late(self.unvalidated)
            saved = self.start.saved
            if self.benchmarks and saved and self.benchmarks.is_missing(saved):
                self.saver.wait()
                self.benchmarks.measure(saved.step, never)
            unread: tuple[int, Any] | None = None
            for step in itertools.count(first):
                closing_seconds = self._validation_seconds + self.saver.seconds
                self.length.decide(step, closing_seconds, any_process)
                if step == self.total_steps:
                    break
                try:
                    taken = learner.take(step, stops, self.length.learning_rate(step))
                except Interrupted:
                    if self._latest is not None and self._last_saved != self._latest.global_step:
                        self._save(self._latest, competes=False)
                    break
                stop.begin()
                self._check_saved_state()
                if unread is not None:
                    self._record(self._read(*unread), progress)
                unread = step, taken
                is_last = step == self.total_steps - 1
                stopping, due = stops.anywhere(), intervals.after(step, is_last)
                due = due._replace(checkpoint=due.checkpoint or stopping)
                if due.checkpoint or due.validation or not learner.reads_late:
                    stopping |= self._finish_step(*unread, progress, stops, due)
                    unread = None
                if stopping:
                    break
                self.saver.raise_failure()
            self._check_saved_state()
        if learner.failure is not None:
            raise learner.failure
        return self._latest

    def _finish_step(
        self, step: int, taken: Any, progress: Progress[R], stops: Stops, due: Due
    ) -> bool:
        """Read a step; validate it if due, record it, save and measure it if due. Return whether a
        validation or measurement was interrupted, which the next start repeats, or whether the run
        ends early; never in the last step."""
        metrics = self._read(step, taken)
        is_last = step == self.total_steps - 1
        stops = NEVER if is_last else stops
        is_interrupted = ends_early = False
        if due.validation:
            begin = time.monotonic()
            try:
                metrics = self.learner.validate(metrics, stops)
                ends_early = not is_last and self._ends_early(metrics)
            except Interrupted:
                is_interrupted = True
            self._validation_seconds = time.monotonic() - begin
        self._record(metrics, progress)
        if ends_early:
            due, is_last, stops = due._replace(checkpoint=True), True, NEVER
        if due.checkpoint or is_interrupted:
            self._save(metrics, due.competes and not is_interrupted)
        try:
            if self.benchmarks and self.benchmarks.are_due(step, is_last):
                self.saver.wait()
                self.benchmarks.measure(step, stops.anywhere)
        except Interrupted:
            is_interrupted = True
        return is_interrupted or ends_early

    def _ends_early(self, metrics: R) -> bool:
        """Count the validation of a step, which becomes the run's last if stop_after says so."""
        self._stopped_after = self.early_stop.count(metrics)
        if self._stopped_after is None:
            return False
        self.length.total_steps = metrics.global_step + 1
        self.early_stop.end(metrics.global_step)
        return True

    def _read(self, step: int, taken: Any) -> R:
        """Wait until a step is complete, and record non-finite values."""
        metrics, result = self.learner.read(step, taken)
        self.failed_steps.note(step, result)
        return metrics

    def _record(self, metrics: R, progress: Progress[R]) -> None:
        """Write a step's metrics to metrics.jsonl and show them."""
        self._latest = metrics
        self.losses.add(metrics)
        self.metrics.append(metrics)
        if metrics.train_loss is None:
            self.failed_steps.check_step(metrics.global_step)
        progress.show(metrics)

    def _save(self, metrics: R, competes: bool) -> None:
        """Start saving a checkpoint, and computing whether its arrays are finite."""
        self._check_saved_state()
        record = self.learner.record
        validation_loss, selection_loss = self.learner.losses(metrics)
        meta = describe_checkpoint(
            *(self.start.config, self.mesh, metrics.global_step, self.total_steps),
            tokens_seen=metrics.tokens_seen,
            train_loss=metrics.train_loss,
            **self.losses.summary(),
            learning_rate=metrics.learning_rate,
            validation_loss=validation_loss,
            selection_loss=selection_loss if competes else None,
            stopped_after=self._stopped_after,
            datasets=record.datasets,
            tokenizer=record.tokenizer,
        )
        flags = self.saver.save(self.learner.model, self.learner.optimizer, meta)
        self._saved = metrics.global_step, flags
        self._last_saved = metrics.global_step

    def _check_saved_state(self) -> None:
        """Raise RunFailure if an array of the last checkpoint was not finite."""
        if self._saved is not None:
            self.failed_steps.check_state(*self._saved)
            self._saved = None

    def _validate_late(self, metrics: R) -> None:
        """Validate a step that was saved without its validation, and save it again."""
        metrics = self.learner.validate(metrics, NEVER)
        if self.learner.losses(metrics)[1] is not None:
            self.metrics.replace_last(metrics)
            self._ends_early(metrics)
            interval = self.start.config.train.checkpoint_interval
            self._save(metrics, competes=metrics.global_step % interval == 0)

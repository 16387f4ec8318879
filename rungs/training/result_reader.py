"""The results of each step, read on the host: metrics, warnings, and failures that end the run.

A new field of `metrics.jsonl` (see `rungs/run/metrics.py`) is filled in `ResultReader.read`.
"""

import logging
import time

import jax

from rungs.checkpointing.saver import Saver
from rungs.common.errors import RunFailure
from rungs.model.gpt import GPT
from rungs.optim.multi_steps import MultiSteps
from rungs.run.metrics import Spike, StepMetrics
from rungs.step.nonfinite import Flags, checked_names, describe_first, finite_flags, nonfinite_names
from rungs.step.state import named_arrays
from rungs.step.train_step import StepResult
from rungs.training.failed_step import FailedStepRecorder
from rungs.training.loss_spikes import LossSpikeDetector

log = logging.getLogger("rungs")


class ResultReader:
    """Reads the results of steps, in order.

    Args:
        first_step: of this start.
        tokens_per_step: input tokens.
        model: the model that the steps train.
        optimizer: its optimizer.
        spikes: knows the losses before this start.
        failed_steps: saves failed steps.
        saver: of the run's checkpoints; a failed step waits for a pending save.
    """

    def __init__(
        self,
        first_step: int,
        tokens_per_step: int,
        model: GPT,
        optimizer: MultiSteps,
        spikes: LossSpikeDetector,
        failed_steps: FailedStepRecorder,
        saver: Saver,
    ) -> None:
        self.spikes = spikes
        self._first_step, self._tokens_per_step = first_step, tokens_per_step
        self._suspects = checked_names(model, optimizer.wrt)
        self._failed_steps, self._saver = failed_steps, saver
        self._skipped_steps: list[int] = []
        self._last_read = time.perf_counter()

    def read(self, step: int, result: StepResult) -> StepMetrics:
        """Wait until a step is complete; return its metrics."""
        values = StepResult(*jax.device_get(tuple(result)))
        seconds = self._seconds_since_last()
        bad, routing = values.nonfinite(self._suspects), values.routing
        if bad:
            self._warn_of_dropped(step, bad, len(values.first_nonfinite_A))
        loss = values.loss
        metrics = StepMetrics(
            global_step=step,
            tokens_seen=(step + 1) * self._tokens_per_step,
            train_loss=loss,
            learning_rate=float(values.learning_rate),
            gradient_norm=float(values.gradient_norm),
            clipped=bool(values.clipped),
            dropped_microbatches=len(bad),
            step_seconds=seconds,
            tokens_per_second=self._tokens_per_step / seconds,
            load_balancing_loss=float(routing.balance_loss) if routing else None,
            expert_tokens=routing.counts_E.tolist() if routing else None,
            spike=self._spike(step, values.trained_loss, bool(values.skipped)),
            loss_scale=None if values.loss_scale is None else float(values.loss_scale),
            resumed=step == self._first_step > 0 or None,
        )
        self.spikes.add(metrics)
        return metrics

    def check_failed_step(self, step: int, model: GPT) -> None:
        """Raise RunFailure if the run cannot continue after a step without a finite microbatch.

        That is so if a parameter is not finite, or if too many steps in a row failed.
        """
        self.check_state(step, finite_flags(named_arrays(model)))
        self.spikes.check_non_finite_steps(step)

    def check_state(self, step: int, flags: Flags) -> None:
        """Raise RunFailure if a parameter or an optimizer moment is not finite."""
        if names := nonfinite_names(flags):
            replay = self._record_failed(step, {})
            others = f" and {len(names) - 1} more" * (len(names) > 1)
            raise RunFailure(
                f"step {step}: {names[0]}{others} not finite; training stopped without saving: the"
                f" same command resumes from the newest checkpoint; {replay}"
            )

    def _seconds_since_last(self) -> float:
        """Return the seconds since the last step was complete, stalls included."""
        now = time.perf_counter()
        seconds, self._last_read = now - self._last_read, now
        return seconds

    def _spike(self, step: int, loss: float | None, is_skipped: bool) -> Spike | None:
        """Return whether the step is a loss spike, with a warning if it is.

        A step that trained on nothing is none, whatever the losses of single microbatches.
        """
        if loss is None:
            return None
        limit = self.spikes.loss_limit(step)
        if is_skipped:
            self._skipped_steps.append(step)
            action = "skipped: weights and optimizer state are as before"
        elif loss > limit:
            action = 'update applied; "skip_spikes": true skips such steps'
        else:
            return None
        log.warning("step %d: loss spike, %.4g is above %.4g; %s", step, loss, limit, action)
        return "skipped" if is_skipped else "seen"

    def _warn_of_dropped(self, step: int, bad: dict[int, str], microbatches: int) -> None:
        replay = self._record_failed(step, bad)
        log.warning(
            "step %d: %d of %d microbatches dropped: %s is not finite; %s",
            *(step, len(bad), microbatches, describe_first(bad), replay),
        )

    def _record_failed(self, step: int, bad: dict[int, str]) -> str:
        """Save a failed step; return the end of a log message that says how to replay it."""
        self._saver.wait()  # it may be saving the newest checkpoint or deleting an old one
        return self._failed_steps.record(step, bad, self._skipped_steps)

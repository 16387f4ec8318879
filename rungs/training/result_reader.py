"""What came of each step, read on the host: its metrics, what went wrong, and whether that ends the
run."""

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
from rungs.training.failed_step import Capsules
from rungs.training.spikes import Health

log = logging.getLogger("rungs")


class StepReader:
    """Reads steps in their order.

    Args:
        tokens_per_step: input tokens.
        model, optimizer: that the steps train.
        health: the losses before this start.
        capsules: where a step that went wrong is kept.
        saver: of the run's checkpoints; a capsule waits for the one under way.
    """

    def __init__(
        self,
        tokens_per_step: int,
        model: GPT,
        optimizer: MultiSteps,
        health: Health,
        capsules: Capsules,
        saver: Saver,
    ) -> None:
        self.health = health
        self._tokens_per_step = tokens_per_step
        self._suspects = checked_names(model, optimizer.wrt)
        self._capsules, self._saver = capsules, saver
        self._skipped_steps: list[int] = []
        self._clock = Clock()

    def read(self, step: int, result: StepResult) -> StepMetrics:
        """The step's metrics, once it is complete."""
        values = StepResult(*jax.device_get(tuple(result)))
        seconds = self._clock.lap()
        bad, routing = values.nonfinite(self._suspects), values.routing
        if bad:
            self._say_what_is_bad(step, bad, len(values.first_nonfinite_A))
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
        )
        self.health.note(metrics)
        return metrics

    def refuse_to_go_on(self, step: int, model: GPT) -> None:
        """Raises RunFailure where a step without a finite microbatch is one too many, or will be
        followed by no other, as a parameter is not finite."""
        self.refuse_bad_state(step, finite_flags(named_arrays(model)))
        self.health.refuse_to_go_on(step)

    def refuse_bad_state(self, step: int, flags: Flags) -> None:
        """Raises RunFailure where a parameter or a moment is not finite."""
        if names := nonfinite_names(flags):
            kept = self._kept(step, {})
            others = f" and {len(names) - 1} more" * (len(names) > 1)
            raise RunFailure(
                f"step {step}: {names[0]}{others} not finite; stopped, and not saved: the same"
                f" command goes on from the newest checkpoint; {kept}"
            )

    def _spike(self, step: int, loss: float | None, is_skipped: bool) -> Spike | None:
        if loss is None:  # then nothing was trained on, whatever the loss of single microbatches
            return None
        limit = self.health.loss_limit(step)
        if is_skipped:
            self._skipped_steps.append(step)
            left_out = "left out: weights and optimizer state are as before"
        elif loss > limit:
            left_out = 'trained on; "skip_spikes": true would leave it out'
        else:
            return None
        log.warning(
            "step %d: the loss, %.4g, is a spike, above %.4g; %s", step, loss, limit, left_out
        )
        return "skipped" if is_skipped else "seen"

    def _say_what_is_bad(self, step: int, bad: dict[int, str], microbatches: int) -> None:
        kept = self._kept(step, bad)
        log.warning(
            "step %d: %d of %d microbatches left out: %s is not finite; %s",
            *(step, len(bad), microbatches, describe_first(bad), kept),
        )

    def _kept(self, step: int, bad: dict[int, str]) -> str:
        """Keep a capsule of a step; returns what to say of it."""
        self._saver.wait()  # for the newest checkpoint, and as it may delete the one before
        return self._capsules.keep(step, bad, self._skipped_steps)


class Clock:
    """Seconds from one completed step to the next, stalls included."""

    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds

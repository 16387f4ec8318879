"""What the steps of a run so far say of the next one: whether its loss is a spike, and whether
there have been too many without a number."""

import collections
import math
from collections.abc import Iterable

import numpy as np

from rungs.common.errors import RunFailure
from rungs.config.train_config import TrainConfig
from rungs.run.metrics import StepMetrics

WINDOW_STEPS = 128
"""Steps that a loss is compared with, as in OLMo-core's `SkipStepOptimizer`."""
LEAST_STEPS = 32
"""With fewer there is no telling."""
DEVIATIONS = 6.0
"""Standard deviations above the median that a spike is at least. OLMo-core has six above the mean,
which a spike draws to itself, as it does the root of the mean square."""
LEAST_FACTOR = 1.5
"""Times the median that it is at least: where losses hardly differ, noise is many deviations."""
LEAST_RISE = 0.1
"""Nats above the median that it is at least: near zero, batches differ by large factors."""
DEVIATIONS_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_UNREAD_STEPS = 1
"""When a step is sent to the devices, that before it has not been read yet."""


class Health:
    """The losses of a run's latest steps.

    Args:
        train: hyperparameters.
        before: steps that were taken before this start, in order.
    """

    def __init__(self, train: TrainConfig, before: Iterable[StepMetrics] = ()) -> None:
        self._train = train
        self._losses: collections.deque[tuple[int, float]] = collections.deque(
            maxlen=WINDOW_STEPS + _UNREAD_STEPS
        )
        self.non_finite_steps = 0
        """Steps in a row, up to the last, in which no microbatch counted."""
        for metrics in before:
            self.note(metrics)

    def note(self, metrics: StepMetrics) -> None:
        """Take a step into account, once it has been read."""
        if metrics.train_loss is None:
            self.non_finite_steps += 1
            return
        self.non_finite_steps = 0
        self._losses.append((metrics.global_step, metrics.train_loss))

    def loss_limit(self, step: int) -> float:
        """The loss, in nats, above which that of a step is a spike; infinite at a run's start.

        It is the same whether or not the step before has been read, so that a resumed run has the
        limits of one that was never interrupted.
        """
        last = step - 1 - _UNREAD_STEPS
        losses = [loss for at, loss in self._losses if last - WINDOW_STEPS < at <= last]
        if len(losses) < LEAST_STEPS:
            return math.inf
        median = float(np.median(losses))
        deviation = DEVIATIONS_PER_MAD * float(np.median(np.abs(np.subtract(losses, median))))
        return max(median + DEVIATIONS * deviation, LEAST_FACTOR * median, median + LEAST_RISE)

    def refuse_to_go_on(self, step: int) -> None:
        """Raises RunFailure after `max_non_finite_steps` in a row, of which `step` is the last."""
        if self.non_finite_steps >= self._train.max_non_finite_steps:
            raise RunFailure(
                f"step {step}: no finite loss and gradient in {self.non_finite_steps} steps in a"
                " row; stopped, with weights and optimizer state as before them. What led there is"
                " in capsules/ (see --replay); --from goes back to an earlier checkpoint"
            )

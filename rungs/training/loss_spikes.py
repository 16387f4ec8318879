"""Loss spikes: the limit above which the next step's loss is one, computed from earlier losses."""

import collections
import math
from collections.abc import Iterable

import numpy as np

from rungs.run.metrics import StepMetrics

WINDOW_STEPS = 128
"""Steps that a loss is compared with, as in OLMo-core's `SkipStepOptimizer`."""
MIN_STEPS = 32
"""With fewer losses in the window no loss counts as a spike."""
DEVIATIONS = 6.0
"""A spike is at least so many standard deviations above the median. OLMo-core takes six above the
mean, but spikes raise the mean, and the root mean square deviation too."""
MIN_FACTOR = 1.5
"""A spike is at least so many times the median: if losses hardly differ, noise is many
deviations."""
MIN_RISE = 0.1
"""A spike is at least so many nats above the median: near zero, batches differ by large factors."""
DEVIATIONS_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_UNREAD_STEPS = 1
"""When a step is dispatched, the results of so many steps before it have not been read yet."""


class LossSpikeDetector:
    """Keeps the losses of a run's latest steps, beginning with those before this start, in
    order."""

    def __init__(self, before: Iterable[StepMetrics] = ()) -> None:
        self._losses: collections.deque[tuple[int, float]] = collections.deque(
            maxlen=WINDOW_STEPS + _UNREAD_STEPS
        )
        for metrics in before:
            self.add(metrics)

    def add(self, metrics: StepMetrics) -> None:
        """Add the next step."""
        if metrics.train_loss is not None:
            self._losses.append((metrics.global_step, metrics.train_loss))

    def loss_limit(self, step: int) -> float:
        """Return the loss, in nats, above which this step is a spike; infinite early in a run. It
        does not depend on whether the step before has been read, so a resumed run has the same
        limits as one that was never interrupted."""
        last = step - 1 - _UNREAD_STEPS
        losses = [loss for at, loss in self._losses if last - WINDOW_STEPS < at <= last]
        if len(losses) < MIN_STEPS:
            return math.inf
        median = float(np.median(losses))
        deviation = DEVIATIONS_PER_MAD * float(np.median(np.abs(np.subtract(losses, median))))
        return max(median + DEVIATIONS * deviation, MIN_FACTOR * median, median + MIN_RISE)

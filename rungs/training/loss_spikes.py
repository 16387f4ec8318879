"""Detection of loss spikes: the loss limit of the next step, computed from earlier losses."""

import collections
import math
from collections.abc import Iterable

import numpy as np

from rungs.run.metrics import StepMetrics

WINDOW_STEPS = 128
"""Steps whose losses are compared, as in OLMo-core's `SkipStepOptimizer`."""
MIN_STEPS = 32
"""Losses in the window without which none counts as a spike."""
DEVIATIONS = 6.0
"""Minimum standard deviations of a spike above the median. OLMo-core uses six above the mean, but
spikes raise the mean and the standard deviation too."""
MIN_FACTOR = 1.5
"""Minimum ratio of a spike to the median: if losses hardly differ, noise is many deviations."""
MIN_RISE = 0.1
"""Minimum nats of a spike above the median: near zero, batches differ by large factors."""
DEVIATIONS_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_UNREAD_STEPS = 1
"""Previous steps whose results are unread when a step is dispatched."""


class LossSpikeDetector:
    """Tracks the losses of a run's latest steps, including those before this start, in order."""

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
        """Return the loss in nats above which this step is a spike; infinity early in a run. It
        ignores the unread previous step, so resumed and uninterrupted runs have the same limits."""
        last = step - 1 - _UNREAD_STEPS
        losses = [loss for at, loss in self._losses if last - WINDOW_STEPS < at <= last]
        if len(losses) < MIN_STEPS:
            return math.inf
        median = float(np.median(losses))
        deviation = DEVIATIONS_PER_MAD * float(np.median(np.abs(np.subtract(losses, median))))
        return max(median + DEVIATIONS * deviation, MIN_FACTOR * median, median + MIN_RISE)

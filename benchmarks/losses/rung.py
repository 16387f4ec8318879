"""The result of a rung of the ladder: several runs that differ in their seed."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import scipy.stats

from rungs.run.metrics import StepMetrics

CONFIDENCE = 0.95


class Rung(NamedTuple):
    """The finished runs of a rung."""

    name: str
    losses: np.ndarray
    """Validation loss at the end, by seed."""
    bits_per_byte: float
    """At the end, mean of the seeds."""
    seconds: float
    """Of all steps, in the fastest run."""
    tokens: np.ndarray
    """Trained on before each validation."""
    curve: np.ndarray
    """Validation loss then, mean of the seeds."""

    @classmethod
    def of(cls, name: str, runs: Sequence[Sequence[StepMetrics]]) -> Self:
        """Return the result of a rung from the steps of its runs."""
        validated = [[step for step in run if step.validation_loss is not None] for run in runs]
        losses = np.asarray([[step.validation_loss for step in run] for run in validated], float)
        bits = np.asarray([run[-1].bits_per_byte for run in validated], float)
        seconds = min(sum(step.step_seconds or 0 for step in run) for run in runs)
        tokens = np.asarray([step.tokens_seen for step in validated[0]])
        return cls(name, losses[:, -1], float(bits.mean()), seconds, tokens, losses.mean(axis=0))


def interval(values: np.ndarray) -> float:
    """Return half the width of the confidence interval of a mean, by Student's t."""
    quantile = scipy.stats.t.ppf((1 + CONFIDENCE) / 2, len(values) - 1)
    return float(quantile * values.std(ddof=1) / math.sqrt(len(values)))

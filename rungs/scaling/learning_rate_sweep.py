"""Runs and results of a learning-rate sweep: several variants of a run at several learning rates.
`rungs/commands/grid.py` trains them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rungs.run.metrics import StepMetrics

LAST_STEPS = 20
"""Steps whose mean training loss is the final loss if there is no validation."""


class SweepRun(NamedTuple):
    """A run to train."""

    series: str
    """Name of the variant, shared by its learning rates: `emb_dim 64`, `muon`."""
    learning_rate: float
    changes: Mapping[str, Any]
    """Other keys that differ from the origin run."""

    @property
    def folder_name(self) -> str:
        return f"{self.series.replace(' ', '-')}-rate-{self.learning_rate:g}"

    @property
    def all_changes(self) -> dict[str, Any]:
        """All keys that differ from the origin run."""
        return {**self.changes, "learning_rate": self.learning_rate}


class Point(NamedTuple):
    """The result of a run: its `final_loss`."""

    series: str
    learning_rate: float
    loss: float


def best_rates(points: Sequence[Point]) -> dict[str, float]:
    """Return the learning rate with the lowest loss, by series: the minimum of the parabola through
    the best point and its neighbours over the log of the rate; the best point itself if it is the
    first or last; NaN if no loss is finite."""
    return {name: _best_rate(series) for name, series in points_by_series(points).items()}


def points_by_series(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points of each series, sorted by learning rate."""
    names = dict.fromkeys(point.series for point in points)
    ordered = sorted(points, key=lambda point: point.learning_rate)
    return {name: [point for point in ordered if point.series == name] for name in names}


def is_best_at_end(points: Sequence[Point]) -> bool:
    """Whether the best point of a series is at an end, so that a better rate may lie outside."""
    best = min(points, key=lambda point: point.loss)
    return best in (points[0], points[-1])


def _best_rate(points: Sequence[Point]) -> float:
    best = min(range(len(points)), key=lambda at: points[at].loss)
    if not math.isfinite(points[best].loss):
        return math.nan
    around = points[max(best - 1, 0) : best + 2]
    if len(around) < 3 or not all(math.isfinite(point.loss) for point in around):
        return points[best].learning_rate
    logs = np.log([point.learning_rate for point in around])
    curve = np.polyfit(logs, [point.loss for point in around], 2)
    return float(np.exp(-curve[1] / (2 * curve[0]))) if curve[0] > 0 else around[1].learning_rate


def final_loss(steps: Sequence[StepMetrics]) -> float:
    """Return the last validation loss or, without validation, the mean of the last training losses;
    infinity if not finite."""
    if steps[-1].validation_loss is not None:
        return steps[-1].validation_loss
    losses = [step.train_loss for step in steps[-LAST_STEPS:]]
    finite = [loss for loss in losses if loss is not None]
    return float(np.mean(finite)) if len(finite) == len(losses) else math.inf

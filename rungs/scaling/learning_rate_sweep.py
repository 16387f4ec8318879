"""One run trained at several learning rates, in several variants, each in its own run folder."""

import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rungs.common.errors import RunFailure
from rungs.run import metrics
from rungs.run.derive import NewRun
from rungs.run.folder import RunFolder

LAST_STEPS = 20
"""Without validation, the final loss is the mean training loss of this many steps."""


class SweepRun(NamedTuple):
    """A run to train."""

    series: str
    """What it shares with runs at other learning rates: `emb_dim 64`, `muon`."""
    learning_rate: float
    changes: Mapping[str, Any]
    """The other keys that differ from the origin run."""


class Point(NamedTuple):
    """The result of a run."""

    series: str
    learning_rate: float
    loss: float
    """Validation loss at the end or, without validation, the mean of the last training losses.
    Infinite if they are not finite."""


def sweep(
    origin: Path, folder: Path, runs: Sequence[SweepRun], datasets_dir: Path, train_command: Path
) -> Iterator[Point]:
    """Train each run to its end, one after the other, and yield its result.

    Args:
        origin: the run folder that they are derived from.
        folder: parent of the new run folders.
        train_command: the path of `train.py`.

    Raises:
        UserError: a change does not fit the run, or another run is in the way. No folder is made
            then.
        RunFailure: a run failed, and not because of its learning rate.
    """
    new = [NewRun.of(folder / _name(run), origin, _changes(run)) for run in runs]
    for run, new_run in zip(runs, new, strict=True):
        loss = _train(RunFolder(new_run.make()), datasets_dir, train_command)
        yield Point(run.series, run.learning_rate, loss)


def best_rates(points: Sequence[Point]) -> dict[str, float]:
    """Return the learning rate with the lowest loss, by series. It is interpolated: the minimum of
    the parabola through the best point and its neighbours, over the logarithm of the rate. The best
    point itself if it is the first or last; NaN if no loss is finite."""
    return {name: _best_rate(series) for name, series in points_by_series(points).items()}


def points_by_series(points: Sequence[Point]) -> dict[str, list[Point]]:
    """Return the points of each series, sorted by learning rate."""
    names = dict.fromkeys(point.series for point in points)
    ordered = sorted(points, key=lambda point: point.learning_rate)
    return {name: [point for point in ordered if point.series == name] for name in names}


def is_best_at_end(points: Sequence[Point]) -> bool:
    """Whether the best point of a series is the first or last, so that a better learning rate may
    lie outside the ones tried."""
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


def _name(run: SweepRun) -> str:
    return f"{run.series.replace(' ', '-')}-rate-{run.learning_rate:g}"


def _changes(run: SweepRun) -> dict[str, Any]:
    return {**run.changes, "learning_rate": run.learning_rate}


def _train(run: RunFolder, datasets_dir: Path, train_command: Path) -> float:
    """Train a run to its end and return its final loss."""
    command = [sys.executable, str(train_command), str(run.path)]
    command += ["--datasets-dir", str(datasets_dir)]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    steps = metrics.read(run.metrics)
    if done.returncode and not (steps and steps[-1].train_loss is None):
        last_line = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunFailure(f"{run.path}: {last_line}")
    return _final_loss(steps)


def _final_loss(steps: Sequence[metrics.StepMetrics]) -> float:
    if steps[-1].validation_loss is not None:
        return steps[-1].validation_loss
    losses = [step.train_loss for step in steps[-LAST_STEPS:]]
    finite = [loss for loss in losses if loss is not None]
    return float(np.mean(finite)) if len(finite) == len(losses) else math.inf

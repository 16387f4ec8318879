"""One run trained at several learning rates, and in several ways, each in a run folder of its
own."""

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
"""Where there is no validation, the training loss is a mean over so many."""


class SweepRun(NamedTuple):
    """A run to make."""

    line: str
    """What it has in common with others at other learning rates: `emb_dim 64`, `muon`."""
    learning_rate: float
    changes: Mapping[str, Any]
    """The other keys in which it differs from the run that it is made from."""


class Point(NamedTuple):
    """How a run ended."""

    line: str
    learning_rate: float
    loss: float
    """Validation loss at the end or, without validation, the mean of the last training losses;
    infinite where they are not finite."""


def sweep(
    origin: Path, folder: Path, cases: Sequence[SweepRun], datasets_dir: Path, train_command: Path
) -> Iterator[Point]:
    """Train each, or what is left of it, one after the other; yields it when it has ended.

    Args:
        origin: the run folder that they are made from.
        folder: to hold their run folders.
        datasets_dir: where datasets lie, or will.
        train_command: the path of `train.py`.

    Raises:
        UserError: a change does not fit the run, or another run is there; none is made then.
        RunFailure: a run failed through more than its learning rate.
    """
    runs = [NewRun.of(folder / _name(case), origin, _changes(case)) for case in cases]
    for case, run in zip(cases, runs, strict=True):
        loss = _loss_of(RunFolder(run.make()), datasets_dir, train_command)
        yield Point(case.line, case.learning_rate, loss)


def best_rates(points: Sequence[Point]) -> dict[str, float]:
    """Of each line the learning rate with the lowest loss, between those tried: the least of the
    parabola through the best and its neighbours, in logarithms; the best itself at an end. NaN
    where no loss is finite."""
    return {line: _best_rate(of_line) for line, of_line in lines_of(points).items()}


def lines_of(points: Sequence[Point]) -> dict[str, list[Point]]:
    """The points of each line, by learning rate."""
    names = dict.fromkeys(point.line for point in points)
    ordered = sorted(points, key=lambda point: point.learning_rate)
    return {name: [point for point in ordered if point.line == name] for name in names}


def is_at_end(points: Sequence[Point]) -> bool:
    """Whether the best of a line's points is the first or the last, so that a better one may lie
    beyond."""
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


def _name(case: SweepRun) -> str:
    return f"{case.line.replace(' ', '-')}-rate-{case.learning_rate:g}"


def _changes(case: SweepRun) -> dict[str, Any]:
    return {**case.changes, "learning_rate": case.learning_rate}


def _loss_of(run: RunFolder, datasets_dir: Path, train_command: Path) -> float:
    """Of a run, trained to its end first."""
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
    whole = [loss for loss in losses if loss is not None]
    return float(np.mean(whole)) if len(whole) == len(losses) else math.inf

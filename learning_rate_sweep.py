"""One run trained at several widths and learning rates, each in a run folder of its own."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

import metrics
from config import MODEL_FILE, TRAIN_FILE, RunConfig
from errors import RunFailure
from run_folder import RunFolder
from widths import widened

TRAIN_COMMAND = Path(__file__).with_name("train.py")
LAST_STEPS = 20
"""Where there is no validation, the training loss is a mean over so many."""


class Point(NamedTuple):
    """A run of the sweep."""

    width: int
    learning_rate: float
    loss: float
    """Validation loss at the end; infinite where there is none, or it is not finite."""


def sweep(
    config: RunConfig,
    folder: Path,
    widths: Sequence[int],
    rates: Sequence[float],
    datasets_dir: Path,
) -> list[Point]:
    """Train each, or what is left of it, one after the other.

    Args:
        folder: to hold the run folders.
        datasets_dir: where datasets lie, or will.

    Raises:
        UserError: a width does not fit the model.
        RunFailure: a run failed through more than its learning rate.
    """
    models = {width: widened(config.model, width) for width in widths}
    points = []
    for width, model in models.items():
        for rate in rates:
            run = RunConfig(model, config.train.model_copy(update={"learning_rate": rate}))
            place = folder / f"width-{width}-rate-{rate:g}"
            points.append(Point(width, rate, _loss_of(run, RunFolder(place), datasets_dir)))
    return points


def best_rates(points: Sequence[Point]) -> dict[int, float]:
    """Of each width the learning rate with the lowest loss, between those tried: the least of the
    parabola through the best and its neighbours, in logarithms; the best itself at an end."""
    found = {}
    for width in dict.fromkeys(point.width for point in points):
        of_width = sorted((p for p in points if p.width == width), key=lambda p: p.learning_rate)
        best = min(range(len(of_width)), key=lambda at: of_width[at].loss)
        around = of_width[max(best - 1, 0) : best + 2]
        found[width] = _least(around) if len(around) == 3 else of_width[best].learning_rate
    return found


def _least(around: Sequence[Point]) -> float:
    if not all(math.isfinite(point.loss) for point in around):
        return around[1].learning_rate
    logs = np.log([point.learning_rate for point in around])
    curve = np.polyfit(logs, [point.loss for point in around], 2)
    return float(np.exp(-curve[1] / (2 * curve[0]))) if curve[0] > 0 else around[1].learning_rate


def _loss_of(config: RunConfig, run: RunFolder, datasets_dir: Path) -> float:
    """Of a run, trained to its end first."""
    run.path.mkdir(parents=True, exist_ok=True)
    for name, part in ((MODEL_FILE, config.model), (TRAIN_FILE, config.train)):
        values = part.model_dump(mode="json", exclude_unset=True, exclude={"schema_address"})
        text = json.dumps(values, indent=2) + "\n"
        (run.path / name).write_text(text, encoding="utf-8")
    command = [sys.executable, str(TRAIN_COMMAND), str(run.path)]
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

"""The scores of a run's checkpoints: `evaluations.jsonl` in the run folder, a line per metric."""

import datetime
import math
from collections.abc import Mapping
from pathlib import Path

from rungs.common.strict_json import StrictModel
from rungs.common.text_table import align_columns
from rungs.run import json_records
from rungs.run.folder import RunFolder

_Z = 1.959964
"""A standard normal variable is within ± this with probability 95 %."""


class Evaluation(StrictModel):
    """A metric of a checkpoint on a benchmark."""

    time: str
    """When it was measured, in UTC."""
    checkpoint: str
    """Name of its folder."""
    task: str
    metric: str
    value: float
    low: float | None = None
    """Lower end of a 95 % interval."""
    high: float | None = None
    """Upper end of it."""
    standard_error: float | None = None
    items: int
    few_shot: int = 0

    @property
    def with_error(self) -> str:
        """The value with its interval or its standard error, as far as they are known."""
        if self.low is not None and self.high is not None:
            return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"
        error = f" ± {self.standard_error:.4f}" if self.standard_error is not None else ""
        return f"{self.value:.4f}{error}"

    @property
    def step(self) -> int:
        """Last step of the checkpoint; -1 for imported weights."""
        last = self.checkpoint.rpartition("-")[2]
        return int(last) if last.isdecimal() else -1


def run_of(weights: Path) -> RunFolder | None:
    """Return the run that a checkpoint's weights belong to, None if they are somewhere else."""
    folder = weights.resolve().parent
    run = RunFolder(folder.parent.parent)
    return run if folder.parent == run.checkpoints.resolve() else None


def append(run: RunFolder, evaluations: list[Evaluation]) -> Path:
    """Add evaluations to the file of a run and return its path; raises RunFailure."""
    json_records.append(run, run.evaluations, evaluations)
    return run.evaluations


def read(run: RunFolder) -> list[Evaluation]:
    """Return the evaluations of a run, in the order they were measured. Damaged lines are left
    out."""
    return json_records.read(run.evaluations, Evaluation)


def scores_table(runs: Mapping[str, RunFolder]) -> str | None:
    """Return a table of the scores of runs, None if they have none: a row for each metric, a column
    for each run, with the step of the checkpoint, which is the last one that was measured.

    Args:
        runs: by the name to show.
    """
    columns = [latest(read(run)) for run in runs.values()]
    metrics = dict.fromkeys(key for column in columns for key in column)
    if not metrics:
        return None
    rows = [[*key, *(_cell(column.get(key)) for column in columns)] for key in metrics]
    return align_columns([["benchmark", "metric", *runs], *rows], left=2)


def latest(found: list[Evaluation]) -> dict[tuple[str, str], Evaluation]:
    """Return for each task and metric what was measured on the last checkpoint."""
    ordered = sorted(found, key=lambda one: one.step)
    return {(one.task, one.metric): one for one in ordered}


def _cell(one: Evaluation | None) -> str:
    return "-" if one is None else f"{one.with_error} at step {one.step}"


def wilson_interval(mean: float, items: int) -> tuple[float, float]:
    """Return a 95 % interval of the mean of numbers between 0 and 1: Wilson's score interval for as
    many yes-or-no outcomes (Wilson 1927). Their variance is the largest that such numbers can have,
    so the interval is also wide enough for estimates from several completions.

    Args:
        mean: over items.
        items: how many there are, at least 1.
    """
    weight = _Z**2 / items
    middle = (mean + weight / 2) / (1 + weight)
    reach = _Z * math.sqrt(mean * (1 - mean) / items + weight / (4 * items)) / (1 + weight)
    return max(middle - reach, 0.0), min(middle + reach, 1.0)


def now() -> str:
    """Return the time in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

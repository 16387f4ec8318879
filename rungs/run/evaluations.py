"""The scores of a run's checkpoints: `evaluations.jsonl` in the run folder, a line per metric."""

import contextlib
import datetime
from pathlib import Path

from pydantic import ValidationError

from rungs.common import disk
from rungs.common.paths import is_file
from rungs.common.strict_json import StrictModel
from rungs.run.folder import RunFolder


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
    """Of a 95 % interval."""
    high: float | None = None
    standard_error: float | None = None
    items: int
    few_shot: int = 0


def run_of(weights: Path) -> RunFolder | None:
    """Return the run that a checkpoint's weights belong to, None if they are somewhere else."""
    folder = weights.resolve().parent
    run = RunFolder(folder.parent.parent)
    return run if folder.parent == run.checkpoints.resolve() else None


def append(run: RunFolder, evaluations: list[Evaluation]) -> Path:
    """Add evaluations to the file of a run and return its path; raises RunFailure."""
    path = run.evaluations
    content = "".join(one.model_dump_json(exclude_none=True) + "\n" for one in evaluations)
    with disk.writing(path, "evaluations"), path.open("a", encoding="utf-8") as file:
        file.write(content)
        disk.flush(file)
    return path


def read(run: RunFolder) -> list[Evaluation]:
    """Return the evaluations of a run, in the order they were measured. Damaged lines are left
    out."""
    if not is_file(run.evaluations):
        return []
    found = []
    for line in run.evaluations.read_bytes().splitlines():
        with contextlib.suppress(ValidationError):
            found.append(Evaluation.model_validate_json(line))
    return found


def now() -> str:
    """Return the time in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

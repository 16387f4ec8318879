"""Files in a run folder with one record per line: benchmark scores (`evaluations.jsonl`),
completions of sample_prompts (`samples.jsonl`), starts, stops and failures (`events.jsonl`),
numbers of steps (`length.jsonl`)."""

import contextlib
import datetime
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import ValidationError

from rungs.common import disk, shown_text, strict_json
from rungs.config.base import Size
from rungs.run.folder import RunFolder

EventKind = Literal["start", "stop", "failure", "finish", "spike", "warning", "stall"]
SAMPLE_KINDS = ("greedy", "sampled")
_Z = 1.959964
"""A standard normal variable is within ± this with probability 95%."""


class Record(strict_json.StrictModel):
    """A line of a file."""

    FILE: ClassVar[str]

    time: str
    """Time of the measurement, sample or event, in UTC."""


class Evaluation(Record):
    """A metric of a checkpoint on a benchmark."""

    FILE = "evaluations.jsonl"

    checkpoint: str
    """Name of the checkpoint's folder."""
    task: str
    metric: str
    value: float
    low: float | None = None
    """Lower end of a 95% confidence interval."""
    high: float | None = None
    """Upper end of it."""
    standard_error: float | None = None
    items: int
    few_shot: int = 0

    @property
    def with_error(self) -> str:
        """The value with its interval or standard error, if known."""
        if self.low is not None and self.high is not None:
            return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"
        error = f" ± {self.standard_error:.4f}" if self.standard_error is not None else ""
        return f"{self.value:.4f}{error}"

    @property
    def step(self) -> int:
        """Last step of the checkpoint; -1 for imported weights."""
        last = self.checkpoint.rpartition("-")[2]
        return int(last) if last.isdecimal() else -1


class Sample(Record):
    """A checkpoint's completion of a prompt."""

    FILE = "samples.jsonl"

    step: int
    checkpoint: str
    """Name of the checkpoint's folder."""
    prompt: str
    temperature: float
    """0 is greedy."""
    seed: int
    text: str
    """The completion, without the prompt."""
    tokens: int
    """Number of tokens of the completion."""
    ended: bool
    """Whether the model ended the text itself."""

    @property
    def kind(self) -> str:
        """One of `SAMPLE_KINDS`."""
        return SAMPLE_KINDS[self.temperature > 0]


class Event(Record):
    """Something that happened to a run."""

    FILE = "events.jsonl"

    event: EventKind
    step: int
    """The last step taken; -1 before the first."""
    text: str


class Length(Record):
    """Number of steps of a run with `max_minutes`, decided from its speed."""

    FILE = "length.jsonl"

    step: int
    """First step whose learning rate follows this number."""
    total_steps: Size
    max_minutes: float | None = None
    """Minutes for which it was decided; None in older files."""


R = TypeVar("R", bound=Record)


def append(run: RunFolder, records: Sequence[Record]) -> None:
    """Append records of one kind to their file, durably; raises RunFailure."""
    for path in {run.path / record.FILE for record in records}:
        with disk.writing(path, path.stem), path.open("a+b") as file:
            is_torn = False
            if file.tell():
                file.seek(-1, os.SEEK_END)
                is_torn = file.read() != b"\n"  # a kill truncated the last line
            file.write(b"\n" * is_torn + _as_text(records).encode())
            disk.flush(file)


def read(run: RunFolder, kind: type[R]) -> list[R]:
    """Return a run's records of a kind, in order. Damaged lines are skipped."""
    path = run.path / kind.FILE
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(ValidationError):
            found.append(kind.model_validate_json(line))
    return found


def read_lengths(run: RunFolder, max_minutes: float) -> list[Length]:
    """Return the numbers of steps decided for this many minutes or, before --extend, for fewer."""
    return [one for one in read(run, Length) if (one.max_minutes or 0) <= max_minutes]


def _as_text(records: Sequence[Record]) -> str:
    return "".join(one.model_dump_json(exclude_none=True) + "\n" for one in records)


def now() -> str:
    """Return the time in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def read_samples(run: RunFolder) -> list[Sample]:
    """Return the samples of a run, by step; a later one of the same prompt, kind and step wins."""
    distinct = {(one.step, one.prompt, one.kind): one for one in read(run, Sample)}
    return sorted(distinct.values(), key=lambda one: one.step)


def drop_samples_after(run: RunFolder, step: int) -> None:
    """Remove the samples of steps after the one that a start goes back to; raises RunFailure."""
    found, path = read_samples(run), run.path / Sample.FILE
    kept = [one for one in found if one.step <= step]
    if len(kept) < len(found):
        with disk.writing(path, path.stem):
            disk.replace_file(path, _as_text(kept))


def samples_as_text(samples: list[Sample]) -> str:
    """Format samples for a terminal: by prompt and kind, each checkpoint's completion."""
    by_prompt = sorted(samples, key=lambda one: (one.prompt, one.kind))
    lines: list[str] = []
    for (prompt, kind), group in itertools.groupby(by_prompt, lambda one: (one.prompt, one.kind)):
        lines += ["", f"{prompt!r}, {kind}"]
        lines += [f"  step {one.step:>8,}  {one.text!r}" for one in group]
    return "\n".join(lines[1:])


def run_of(weights: Path) -> RunFolder | None:
    """Return the run that a checkpoint's weights belong to, None if they belong to none."""
    folder = weights.resolve().parent
    run = RunFolder(folder.parent.parent)
    return run if folder.parent == run.checkpoints.resolve() else None


def latest_scores(found: list[Evaluation]) -> dict[tuple[str, str], Evaluation]:
    """Return the score of the last measured checkpoint for each task and metric."""
    ordered = sorted(found, key=lambda one: one.step)
    return {(one.task, one.metric): one for one in ordered}


def scores_table(runs: Mapping[str, RunFolder]) -> str | None:
    """Return a table of the scores of runs, given by name: a row per metric, a column per run, with
    the step of the last measured checkpoint. None if there are no scores."""
    columns = [latest_scores(read(run, Evaluation)) for run in runs.values()]
    metrics = dict.fromkeys(key for column in columns for key in column)
    if not metrics:
        return None
    rows = [[*key, *(_cell(column.get(key)) for column in columns)] for key in metrics]
    return shown_text.align_columns([["benchmark", "metric", *runs], *rows], left=2)


def _cell(one: Evaluation | None) -> str:
    return "-" if one is None else f"{one.with_error} at step {one.step}"


def wilson_interval(mean: float, items: int) -> tuple[float, float]:
    """Return a 95% confidence interval for the mean of numbers between 0 and 1, `mean` over at
    least one of `items`: Wilson's score interval for yes-or-no outcomes (Wilson 1927). Those have
    the largest possible variance, so it is also wide enough for averages of several completions."""
    weight = _Z**2 / items
    middle = (mean + weight / 2) / (1 + weight)
    reach = _Z * math.sqrt(mean * (1 - mean) / items + weight / (4 * items)) / (1 + weight)
    return max(middle - reach, 0.0), min(middle + reach, 1.0)

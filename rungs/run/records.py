"""Files in a run folder with a record in each line: scores on benchmarks (`evaluations.jsonl`),
continuations of the sample_prompts (`samples.jsonl`), starts, stops and failures (`events.jsonl`),
numbers of steps (`length.jsonl`)."""

import contextlib
import datetime
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import ValidationError

from rungs.common import disk, paths, text_table
from rungs.common.strict_json import StrictModel
from rungs.config.base import Size
from rungs.run.folder import RunFolder

EventKind = Literal["start", "stop", "failure", "finish", "spike", "stall"]
SAMPLE_KINDS = ("greedy", "sampled")
_Z = 1.959964
"""A standard normal variable is within ± this with probability 95 %."""


class Record(StrictModel):
    """A line of a file."""

    FILE: ClassVar[str]

    time: str
    """When it was measured, sampled or happened, in UTC."""


class Evaluation(Record):
    """A metric of a checkpoint on a benchmark."""

    FILE = "evaluations.jsonl"

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


class Sample(Record):
    """How a checkpoint continues a prompt."""

    FILE = "samples.jsonl"

    step: int
    checkpoint: str
    """Name of its folder."""
    prompt: str
    temperature: float
    """0: greedy."""
    seed: int
    text: str
    """The continuation, without the prompt."""
    tokens: int
    """Number of tokens of the continuation."""
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
    """How many steps a run with `max_minutes` takes, as its speed told."""

    FILE = "length.jsonl"

    step: int
    """First step whose learning rate follows from the number."""
    total_steps: Size
    max_minutes: float | None = None
    """The minutes that it was decided for; None in older files."""


R = TypeVar("R", bound=Record)


def append(run: RunFolder, records: Sequence[Record]) -> None:
    """Add records of one kind to their file, on disk for good; raises RunFailure."""
    run.check()
    for path in {run.path / record.FILE for record in records}:
        with disk.writing(path, path.stem), disk.open_to_append(path) as file:
            is_torn = False
            if file.tell():
                file.seek(-1, os.SEEK_END)
                is_torn = file.read() != b"\n"  # a kill tore the last line
            file.write(b"\n" * is_torn + _as_text(records).encode())
            disk.flush(file)


def read(run: RunFolder, kind: type[R]) -> list[R]:
    """Return a run's records of a kind, in order. Damaged lines are left out."""
    path = run.path / kind.FILE
    found = []
    for line in path.read_bytes().splitlines() if paths.is_file(path) else ():
        with contextlib.suppress(ValidationError):
            found.append(kind.model_validate_json(line))
    return found


def read_lengths(run: RunFolder, max_minutes: float) -> list[Length]:
    """Return the numbers of steps that were decided for so many minutes or, before --extend, for
    fewer."""
    return [one for one in read(run, Length) if (one.max_minutes or 0) <= max_minutes]


def _as_text(records: Sequence[Record]) -> str:
    return "".join(one.model_dump_json(exclude_none=True) + "\n" for one in records)


def now() -> str:
    """Return the time in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def event_message(run: RunFolder, event: Event, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a hook gets of an event. `figures` are the metrics of the last step."""
    return {"run": str(run.path.resolve()), **event.model_dump(), "figures": dict(figures)}


def read_samples(run: RunFolder) -> list[Sample]:
    """Return the samples of a run, by step. Of two of the same prompt and kind after a step the
    later one counts."""
    distinct = {(one.step, one.prompt, one.kind): one for one in read(run, Sample)}
    return sorted(distinct.values(), key=lambda one: one.step)


def drop_samples_after(run: RunFolder, step: int) -> None:
    """Remove the samples of later steps, which a start goes back behind; raises RunFailure."""
    found, path = read_samples(run), run.path / Sample.FILE
    kept = [one for one in found if one.step <= step]
    if len(kept) < len(found):
        with disk.writing(path, path.stem):
            disk.replace_file(path, _as_text(kept))


def samples_as_text(samples: list[Sample]) -> str:
    """Return samples for a terminal: for each prompt and kind, what each checkpoint said."""
    by_prompt = sorted(samples, key=lambda one: (one.prompt, one.kind))
    lines: list[str] = []
    for (prompt, kind), group in itertools.groupby(by_prompt, lambda one: (one.prompt, one.kind)):
        lines += ["", f"{prompt!r}, {kind}"]
        lines += [f"  step {one.step:>8,}  {one.text!r}" for one in group]
    return "\n".join(lines[1:])


def run_of(weights: Path) -> RunFolder | None:
    """Return the run that a checkpoint's weights belong to, None if they are somewhere else."""
    folder = weights.resolve().parent
    run = RunFolder(folder.parent.parent)
    return run if folder.parent == run.checkpoints.resolve() else None


def latest_scores(found: list[Evaluation]) -> dict[tuple[str, str], Evaluation]:
    """Return for each task and metric what was measured on the last checkpoint."""
    ordered = sorted(found, key=lambda one: one.step)
    return {(one.task, one.metric): one for one in ordered}


def scores_table(runs: Mapping[str, RunFolder]) -> str | None:
    """Return a table of the scores of runs, None if they have none: a row for each metric, a column
    for each run, with the step of the checkpoint, which is the last one that was measured. `runs`
    are by the name to show."""
    columns = [latest_scores(read(run, Evaluation)) for run in runs.values()]
    metrics = dict.fromkeys(key for column in columns for key in column)
    if not metrics:
        return None
    rows = [[*key, *(_cell(column.get(key)) for column in columns)] for key in metrics]
    return text_table.align_columns([["benchmark", "metric", *runs], *rows], left=2)


def _cell(one: Evaluation | None) -> str:
    return "-" if one is None else f"{one.with_error} at step {one.step}"


def wilson_interval(mean: float, items: int) -> tuple[float, float]:
    """Return a 95 % interval of the mean of numbers between 0 and 1: Wilson's score interval for as
    many yes-or-no outcomes (Wilson 1927). Their variance is the largest that such numbers can have,
    so the interval is also wide enough for estimates from several completions. `mean` is over at
    least one of `items`."""
    weight = _Z**2 / items
    middle = (mean + weight / 2) / (1 + weight)
    reach = _Z * math.sqrt(mean * (1 - mean) / items + weight / (4 * items)) / (1 + weight)
    return max(middle - reach, 0.0), min(middle + reach, 1.0)

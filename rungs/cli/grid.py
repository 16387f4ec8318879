"""Runs trained one after another, one per combination of values or per learning rate of a sweep."""

import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from rungs.common import strict_json
from rungs.common.errors import (
    EXIT_BAD_INPUT,
    EXIT_FAILED,
    RunFailure,
    UserError,
    errors_at,
    readable_line,
)
from rungs.common.paths import is_plain_name
from rungs.common.run_log import log
from rungs.common.signals import StopSignal
from rungs.integrations.supervisor import run_child
from rungs.planning.mup import Point, SweepRun, final_loss
from rungs.report.comparison_charts import draw_comparison
from rungs.report.run_page import open_runs, write_page
from rungs.run import derive, metrics, recorded_run
from rungs.run.folder import RunFolder, find_run

PAGE = "compare.html"
COMPARISON = "comparison"
_MOST_RUNS = 1000


class Cell(NamedTuple):
    """A run to create and train."""

    origin: str
    """The run to copy."""
    folder: Path
    changes: Mapping[str, Any]
    """Keys that differ from the origin's."""

    def train(self, options: Sequence[str], stop: StopSignal) -> int:
        """Create and train the run with options of `train.py`, and return the exit code. A finished
        run is left as it is, an interrupted one continues."""
        changes = [f"--set={key}={json.dumps(value)}" for key, value in self.changes.items()]
        run = [str(self.folder), "--like", self.origin, *changes, *options]
        return run_child([sys.executable, "-m", "rungs", "train", *run], stop)


def cells(like: str, grid: Sequence[str], settings: Sequence[str], into: Path) -> list[Cell]:
    """Return the runs of a grid in a folder, the last key varying fastest, without writing
    anything. `like` is the run to copy; `grid` has a `key=value,value,…` per axis, `settings` a
    `key=value` for all. Raises UserError if a key or value is wrong, or differs in an existing
    run."""
    axes = dict(map(_axis, grid))
    if len(axes) < len(grid):
        raise UserError("--grid: a key was given twice; give all its values at once")
    common = derive.parse_settings(settings)
    if twice := axes.keys() & common.keys():
        raise UserError(f"--grid and --set: both change {min(twice)}")
    combinations = [
        dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
    ]
    if len(combinations) > _MOST_RUNS:
        raise UserError(f"--grid: {len(combinations):,} runs are more than {_MOST_RUNS:,}")
    found = [Cell(like, into / _name(chosen), common | chosen) for chosen in combinations]
    folder, count = Counter(cell.folder for cell in found).most_common(1)[0]
    if count > 1:
        raise UserError(f"--grid: {count} runs would be {folder}; make them by hand")
    _check(found)
    return found


def _check(cells: Sequence[Cell]) -> None:
    """Raise UserError if the changes don't fit the origin, or something else is in the way."""
    for cell in cells:
        derive.NewRun.of(cell.folder, find_run(cell.origin), cell.changes)


def run_grid(runs: Sequence[Cell], into: Path, options: Sequence[str]) -> int:
    """Train the runs one after another, with `options`; then print and draw their results. The same
    command resumes a grid. A failed run doesn't stop the others. Return the exit code: 128 + the
    number of a signal that stopped the grid; 2 if all runs that failed don't fit their data or
    devices; 1 for other failures; else 0."""
    failed: dict[Path, int] = {}
    with StopSignal() as stop:
        stop.begin()
        for number, cell in enumerate(runs, 1):
            log.info("run %d of %d: %s", number, len(runs), cell.folder)
            code = cell.train(options, stop)
            if stop.number is not None:
                return stop.exit_code or code
            if code:
                failed[cell.folder] = code
    report(runs, into)
    for folder in failed:
        log.warning("%s: failed; the same command tries it again", folder)
    if set(failed.values()) == {EXIT_BAD_INPUT}:
        return EXIT_BAD_INPUT
    return EXIT_FAILED if failed else 0


def sweep(
    origin: Path, folder: Path, runs: Sequence[SweepRun], datasets_dir: Path
) -> Iterator[Point]:
    """Train each run, derived from the run folder `origin`, in a folder to its end, one after
    another, and yield its result. The same call resumes it. Raises UserError, without making a
    folder, if a change does not fit or something else is in the way; RunFailure if a run failed for
    another reason than its learning rate; SystemExit, with 128 + its number, at a signal."""
    found = [Cell(str(origin), folder / run.folder_name, run.all_changes) for run in runs]
    _check(found)
    options = ["--datasets-dir", str(datasets_dir), "--quiet"]
    with StopSignal() as stop:
        stop.begin()
        for run, cell in zip(runs, found, strict=True):
            code, steps = cell.train(options, stop), metrics.read(RunFolder(cell.folder).metrics)
            if stop.number is not None:
                sys.exit(stop.exit_code)
            if code and not (steps and steps[-1].train_loss is None):
                raise RunFailure(f"{cell.folder}: failed; the same command tries it again")
            yield Point(run.series, run.learning_rate, final_loss(steps))


def report(runs: Sequence[Cell], into: Path) -> None:
    """Print a table of the runs with at least one step; draw comparison charts and a page."""
    folders = [cell.folder for cell in runs if RunFolder(cell.folder).metrics.exists()]
    loaded = recorded_run.load_runs(folders)
    taken = [(folder, run) for folder, run in zip(folders, loaded, strict=True) if len(run)]
    if not taken:
        return
    recorded = [run for _, run in taken]
    charts = draw_comparison(recorded, into / COMPARISON)
    write_page(into / PAGE, open_runs([folder for folder, _ in taken]))
    click.echo(f"\n{recorded_run.results_table(recorded)}\n")
    for path in (*charts, into / PAGE):
        click.echo(path)


def _axis(text: str) -> tuple[str, list[Any]]:
    """Return a key and its values."""
    key, equals, values = text.partition("=")
    if not (key and equals and values):
        raise UserError(f"--grid {text}: must have the form key=value,value,…")
    with errors_at(f"--grid {text}: "):
        found = strict_json.parse_value(f"[{values}]")
    if not isinstance(found, list):
        found = list(map(strict_json.parse_value, values.split(",")))
    if len({json.dumps(value) for value in found}) < len(found):
        raise UserError(f"--grid {text}: a value is there twice")
    return key, found


def _name(chosen: Mapping[str, Any]) -> str:
    """Return the folder name of a run, such as `learning_rate=0.001,seed=0`."""
    words = [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in chosen.items()
    ]
    name = ",".join(words).replace("/", "-").replace('"', "").replace(" ", "")
    if not is_plain_name(name):
        shown = readable_line(name[:80])
        raise UserError(f"--grid: {shown} can't be the name of a folder; make the runs by hand")
    return name

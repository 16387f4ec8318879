"""A grid of runs: one for each combination of values."""

import itertools
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from rungs.charts.comparison_charts import draw_comparison
from rungs.common.errors import EXIT_BAD_INPUT, EXIT_FAILED, UserError
from rungs.common.paths import is_plain_name, refuse_control_characters
from rungs.common.signals import StopSignal
from rungs.monitoring.supervisor import run_child
from rungs.page.document import open_runs, write_page
from rungs.run import recorded_run
from rungs.run.derive import NewRun, parse_settings
from rungs.run.folder import find_run

PAGE = "compare.html"
COMPARISON = "comparison"
_MOST_RUNS = 1000

log = logging.getLogger("rungs")


class Cell(NamedTuple):
    """A run of a grid."""

    folder: Path
    changes: Mapping[str, Any]


def cells(like: str, grid: Sequence[str], settings: Sequence[str], into: Path) -> list[Cell]:
    """Return the runs of a grid, the last key varying fastest. Nothing is written.

    Args:
        like: the run to copy.
        grid: `key=value,value,…` each.
        settings: `key=value` for all of them.
        into: the folder of the runs.

    Raises:
        UserError: a key or value is wrong, or a run that is there has other keys.
    """
    refuse_control_characters(into.absolute())
    axes = dict(map(_axis, grid))
    if len(axes) < len(grid):
        raise UserError("--grid: a key was given twice; give all its values at once")
    common, origin = parse_settings(settings), find_run(like)
    if twice := axes.keys() & common.keys():
        raise UserError(f"--grid and --set: both change {min(twice)}")
    combinations = [
        dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
    ]
    if len(combinations) > _MOST_RUNS:
        raise UserError(f"--grid: {len(combinations):,} runs are more than {_MOST_RUNS:,}")
    found = [Cell(into / _name(chosen), common | chosen) for chosen in combinations]
    for cell in found:
        NewRun.of(cell.folder, origin, cell.changes)
    return found


def run_grid(like: str, runs: Sequence[Cell], into: Path, options: Sequence[str]) -> int:
    """Make and train the runs, one after another; then print what they come to, and draw it.

    Runs that have finished are left as they are, so the same command resumes a grid. A run that
    fails doesn't stop the others.

    Args:
        options: of `train.py`, for each run.

    Returns:
        The exit code: 2 if a run doesn't fit its data or devices, 128 + the number of a signal that
        stopped the grid, 1 if a run failed, else 0.
    """
    failed = []
    with StopSignal() as stop:
        stop.begin()
        for number, cell in enumerate(runs, 1):
            log.info("run %d of %d: %s", number, len(runs), cell.folder)
            code = run_child(_command(like, cell, options), stop)
            if code == EXIT_BAD_INPUT or stop.number is not None:
                return stop.exit_code or code
            if code:
                failed.append(cell.folder)
    report(runs, into)
    for folder in failed:
        log.warning("%s: failed; the same command tries it again", folder)
    return EXIT_FAILED if failed else 0


def report(runs: Sequence[Cell], into: Path) -> None:
    """Print a table of the runs that have taken a step; draw comparison charts and a page."""
    folders = [cell.folder for cell in runs]
    loaded = recorded_run.load_runs(folders)
    taken = [(folder, run) for folder, run in zip(folders, loaded, strict=True) if len(run)]
    if not taken:
        return
    recorded = [run for _, run in taken]
    click.echo(f"\n{recorded_run.results_table(recorded)}\n")
    for path in draw_comparison(recorded, into / COMPARISON):
        click.echo(path)
    write_page(into / PAGE, open_runs([folder for folder, _ in taken]))
    click.echo(into / PAGE)


def _command(like: str, cell: Cell, options: Sequence[str]) -> list[str]:
    changes = [f"--set={key}={json.dumps(value)}" for key, value in cell.changes.items()]
    return [sys.executable, sys.argv[0], str(cell.folder), "--like", like, *changes, *options]


def _axis(text: str) -> tuple[str, list[Any]]:
    """Return a key and its values."""
    key, equals, values = text.partition("=")
    if not (key and equals and values):
        raise UserError(f"--grid {text}: must have the form key=value,value,…")
    try:
        found: list[Any] = json.loads(f"[{values}]")
    except (ValueError, RecursionError):
        found = [parse_settings([f"{key}={value}"])[key] for value in values.split(",")]
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
        raise UserError(f"--grid: {name[:80]} can't be the name of a folder; make the runs by hand")
    return name

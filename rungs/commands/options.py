"""Options that several commands have. Loads Click and nothing else, as `--help` needs no more."""

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rungs.config.option_values import DATASETS_VARIABLE, MAX_RESTARTS

DATASETS_DIR_OPTION = click.option(
    "--datasets-dir",
    type=click.Path(path_type=Path, file_okay=False),
    help="Where datasets are stored.  "
    f"[default: ${DATASETS_VARIABLE}, else the project's datasets/]",
)
"""The option of every command that reads or makes datasets, for `find_datasets_dir`."""


class FiniteRange(click.FloatRange):
    """A range without infinity and NaN. Click lets NaN through, which is not below any minimum."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def start_options(
    extended: str, replayed: str, *, has_dry_run: bool = True
) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that adds the argument RUN and the options that `train.py` and
    `reinforce.py` share, for `StartCommand`.

    Args:
        extended: what --extend adds, for its help.
        replayed: what --replay does.
        has_dry_run: whether the help names --dry-run. The command refuses it otherwise.
    """
    options: tuple[Callable[[Any], Any], ...] = (
        click.argument("run", required=False),
        click.option("--like", metavar="RUN", help="First create RUN as a copy of this run."),
        click.option(
            "--set",
            "settings",
            metavar="KEY=VALUE",
            multiple=True,
            help="With --like: change a key of the copy. Can be repeated.",
        ),
        click.option(
            "--from",
            "rewind_to",
            metavar="CHECKPOINT",
            help="Go back to `best`, `latest` or a checkpoint (`step-000375`); later ones are moved"
            " aside.",
        ),
        click.option(
            "--fresh",
            is_flag=True,
            help="Start over; existing checkpoints and metrics are moved aside.",
        ),
        click.option("--extend", is_flag=True, help=f"Resume with more {extended} than before."),
        click.option(
            "--mirror",
            metavar="URL",
            help="Copy each checkpoint there in the background (s3://, gs://, hf://, a path), and"
            " restore the run from there if its folder has no checkpoints.",
        ),
        click.option(
            "--on-event",
            metavar="COMMAND_OR_URL",
            multiple=True,
            help="Run this, or send a POST request there, with the run's figures as JSON, when it"
            " starts, finishes, stops, fails, stalls or has a loss spike. Can be repeated.",
        ),
        click.option(
            "--dry-run",
            is_flag=True,
            hidden=not has_dry_run,
            help="Do everything that a start does, and a few steps, but keep nothing of it, and"
            " write nothing into the run folder.",
        ),
        click.option(
            "--supervise",
            is_flag=True,
            help="Start the run again after a crash, with growing delays; not after wrong input or"
            " a signal to stop.",
        ),
        click.option(
            "--max-restarts",
            type=click.IntRange(0),
            help="With --supervise: give up after this many crashes without a new checkpoint."
            f"  [default: {MAX_RESTARTS}]",
        ),
        click.option("--quiet", is_flag=True, help="Print only warnings and errors."),
        click.option(
            "--json-log", is_flag=True, help="Print messages as JSON, one object in each line."
        ),
        click.option("--replay", metavar="STEP", help=replayed),
        click.option(
            "--coordinator",
            metavar="HOST:PORT",
            help="For several processes: the address of process 0. Slurm, Open MPI, Kubernetes and"
            " TPU pods don't need these three options.",
        ),
        click.option("--processes", type=int, help="Number of processes."),
        click.option("--process", type=int, help="Index of this process, from 0."),
    )
    return lambda main: functools.reduce(
        lambda function, option: option(function), options[::-1], main
    )

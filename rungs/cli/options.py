"""Options that several commands have. Imports only Click, so that `--help` is fast."""

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


WEIGHTS_OPTION = click.option(
    "--weights",
    "averaged",
    type=click.Choice(["ema"]),
    help="ema: the averaged weights of a run with ema_decay.  [default: those of the last update]",
)
"""The option of commands that read a model, for `find_averaged_weights`."""


DTYPE_OPTION = click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Dtype of matrices and activations. Default: float32 on a CPU, else bfloat16.",
)
"""The option of commands that generate text, for `load_token_generator`."""


LIKE_OPTION = click.option("--like", metavar="OTHER", help="RUN is new: a copy of OTHER.")
SET_OPTION = click.option(
    *("--set", "settings"),
    metavar="KEY=VALUE",
    multiple=True,
    help="Change a key of the new run. Can be repeated.",
)
PRESET_OPTION = click.option(
    "--preset",
    metavar="NAME",
    help="RUN is new: it trains a published architecture of this size from scratch, such as"
    " gpt2-medium. docs/models.md lists them.",
)
"""Options of commands that make a run, for `create_like` and `create_preset`."""


class FiniteRange(click.FloatRange):
    """A range without infinity and NaN. Click lets NaN through, as NaN is not below any minimum."""

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
    """Return a decorator that adds the argument RUN and the options shared by `train.py` and
    `reinforce.py`, for `StartCommand`. In the help, `extended` says what --extend adds and
    `replayed` what --replay does. Without `has_dry_run` the help omits --dry-run, and it must be
    refused."""
    option, flag = click.option, functools.partial(click.option, is_flag=True)
    options: tuple[Callable[[Any], Any], ...] = (
        click.argument("run", required=False),
        *(LIKE_OPTION, SET_OPTION),
        option(
            *("--from", "rewind_to"),
            metavar="CHECKPOINT",
            help="Go back to `best`, `latest` or a checkpoint (`step-000375`); later ones are moved"
            " aside.",
        ),
        flag("--fresh", help="Start over; existing checkpoints and metrics are moved aside."),
        flag("--extend", help=f"Resume with more {extended} than before."),
        option(
            "--mirror",
            metavar="URL",
            help="Copy each checkpoint there in the background (s3://, gs://, hf://, a path), and"
            " restore the run from there if its folder has no checkpoints.",
        ),
        option(
            "--on-event",
            metavar="COMMAND_OR_URL",
            multiple=True,
            help="Run this, or send a POST request there, with the run's figures as JSON, when it"
            " starts, finishes, stops, fails, stalls or has a loss spike. Can be repeated.",
        ),
        flag(
            "--dry-run",
            hidden=not has_dry_run,
            help="Do everything that a start does, and a few steps, but keep nothing of it, and"
            " write nothing into the run folder.",
        ),
        flag(
            "--supervise",
            help="Start the run again after a crash, with growing delays; not after wrong input or"
            " a signal to stop.",
        ),
        option(
            "--max-restarts",
            type=click.IntRange(0),
            help="With --supervise: give up after this many crashes without a new checkpoint."
            f"  [default: {MAX_RESTARTS}]",
        ),
        flag("--quiet", help="Print only warnings and errors."),
        flag("--json-log", help="Print messages as JSON, one object in each line."),
        option("--replay", metavar="STEP", help=replayed),
        option(
            "--coordinator",
            metavar="HOST:PORT",
            help="For several processes: the address of process 0. Slurm, Open MPI, Kubernetes and"
            " TPU pods don't need these three options.",
        ),
        option("--processes", type=int, help="Number of processes."),
        option("--process", type=int, help="Index of this process, from 0."),
    )
    return lambda main: functools.reduce(lambda made, each: each(made), options[::-1], main)

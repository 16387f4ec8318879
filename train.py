"""Train a run, or resume it where it stopped: `uv run train.py runs/a-to-a`.

Exit codes: 0 finished; 2 bad input, nothing was changed; 128 + the number of a signal that
stopped it, saved if a step had been taken: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for
SIGHUP, 138, 140 and 152 for SIGUSR1, SIGUSR2 and SIGXCPU; 1 anything else.
"""

from rungs.common.command import begin_command, importing, run_command

from rungs.common import signals

if __name__ == "__main__":
    begin_command()
    signals.exit_on_signal()  # before the slow imports

from pathlib import Path
from typing import Any

import click

from rungs.commands.options import DATASETS_DIR_OPTION, PRESET_OPTION, start_options


@click.command()
@start_options(
    extended="tokens or epochs",
    replayed="Run a failed step (`step-000123`) again and name its first tensor that is not"
    " finite.",
)
@DATASETS_DIR_OPTION
@click.option(
    "--from-step",
    type=click.IntRange(0),
    metavar="N",
    help="With --like: continue that run's checkpoint of step N, with its weights and optimizer"
    " state; --set may change schedule, data or length.",
)
@PRESET_OPTION
@click.option(
    "--grid",
    metavar="KEY=VALUE,VALUE,…",
    multiple=True,
    help="With --like and --into: train a run for each combination of values. Can be repeated.",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --grid: the folder of the runs, instead of RUN.",
)
@click.option(
    "--profile",
    type=click.IntRange(1),
    metavar="STEPS",
    help="Take so many steps under JAX's profiler and print how long each part of a step takes."
    " Writes the trace into RUN/profile, and keeps nothing else.",
)
@click.option(
    "--store-teacher",
    is_flag=True,
    help="Only store what the teacher of RUN predicts for its data, for teacher_top_k.",
)
def main(**options: Any) -> None:
    """Train RUN, a folder with model.json and train.json, or resume it."""
    with importing():
        from rungs.commands.train import train
    train(**options)


if __name__ == "__main__":
    run_command(main)

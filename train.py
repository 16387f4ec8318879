"""Train a run, or resume it where it stopped: `uv run train.py runs/a-to-a`.

Exit codes: 0 finished; 2 bad input, nothing was changed; 130, 143 and 129 stopped by SIGINT
(Ctrl-C), SIGTERM and SIGHUP, saved if a step had been taken; 1 anything else.
"""

from rungs.common import signals

if __name__ == "__main__":
    signals.exit_on_signal()  # before the slow imports

from rungs.common.command import run_command

import sys
from pathlib import Path

import click

from rungs.common.errors import UserError
from rungs.config.run_config import load_run
from rungs.data.catalog import DATASETS_DIR_OPTION, find_datasets_dir
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.options import StartCommand, hold_run, start_options


@click.command()
@start_options(
    extended="tokens or epochs",
    replayed="Run a failed step (`step-000123`) again and name its first tensor that is not"
    " finite.",
)
@DATASETS_DIR_OPTION
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
def main(
    command: StartCommand, datasets_dir: Path | None, grid: tuple[str, ...], into: Path | None
) -> None:
    """Train RUN, a folder with model.json and train.json, or resume it."""
    datasets = find_datasets_dir(datasets_dir)
    if grid or into:
        sys.exit(_train_grid(command, grid, into, datasets))
    command.require_run()
    with command.open_run() as path:
        if command.replay:
            from rungs.training.replay import replay

            sys.exit(replay(RunFolder(path), command.replay, datasets))
        sys.exit(_train(RunFolder(path), command, datasets))


def _train(run: RunFolder, command: StartCommand, datasets: Path) -> int:
    config = load_run(run.path)
    with hold_run(run, config, command.cluster, dry=command.start.dry_run):
        # JAX takes seconds to import; config errors are reported before that.
        from rungs.training.start import launch

        return launch(run, config, command.start, datasets)


def _train_grid(
    command: StartCommand, grid: tuple[str, ...], into: Path | None, datasets: Path
) -> int:
    if command.run or command.like is None or not grid or into is None:
        raise UserError("--grid: needs --like RUN and --into FOLDER, and no RUN")
    if command.start != StartOptions() or command.cluster or command.replay:
        raise UserError("--grid: of the options of a start, only --like and --set go with it")

    from rungs.sweeps.grid import cells, run_grid

    options = ["--datasets-dir", str(datasets), *command.log_options]
    runs = cells(command.like, grid, command.settings, into)
    return run_grid(command.like, runs, into, options)


if __name__ == "__main__":
    run_command(main)

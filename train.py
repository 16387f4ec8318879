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

from rungs.common import run_log
from rungs.config.run_config import load_run
from rungs.data.catalog import DATASETS_DIR_OPTION, find_datasets_dir
from rungs.run.folder import RunFolder
from rungs.training.options import StartCommand, hold_run, start_options


@click.command()
@start_options(
    extended="tokens or epochs",
    replayed="Run a failed step (`step-000123`) again and name its first tensor that is not"
    " finite.",
)
@DATASETS_DIR_OPTION
def main(command: StartCommand, datasets_dir: Path | None) -> None:
    """Train RUN, a folder with model.json and train.json, or resume it."""
    run_log.log_to_terminal()
    datasets = find_datasets_dir(datasets_dir)
    with command.open_run() as path:
        if command.replay:
            from rungs.training.replay import replay

            sys.exit(replay(RunFolder(path), command.replay, datasets))
        sys.exit(_train(RunFolder(path), command, datasets))


def _train(run: RunFolder, command: StartCommand, datasets: Path) -> int:
    config = load_run(run.path)
    with hold_run(run, config, command.cluster):
        # JAX takes seconds to import; config errors are reported before that.
        from rungs.training.start import launch

        return launch(run, config, command.start, datasets)


if __name__ == "__main__":
    run_command(main)

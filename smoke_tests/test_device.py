"""Device check: does this machine compute what it should, and how fast?

    uv run smoke_tests/test_device.py                  # with runs/layers
    uv run --extra cuda smoke_tests/test_device.py runs/gpt2-small

Run it first on a machine that you have just rented; with the default run it took less than three
minutes on two CPU cores. It takes steps of the run on random tokens, needs no dataset, and writes
nothing into the run folder. Prints a table, which bug reports should have.
Exits with code 1 if something is wrong, and says what; docs/accelerators.md explains the figures.
"""

from rungs.common.command import begin_command, run_command

if __name__ == "__main__":
    begin_command()

import sys
from pathlib import Path

import click

from rungs.common import run_log
from rungs.config.run_config import load_run
from rungs.run.folder import find_run


@click.command()
@click.argument("run", default="runs/layers")
@click.option(
    "--into",
    type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path),
    default=Path(),
    help="Write checkpoints into this folder, for a moment.  [default: current one]",
)
def main(run: str, into: Path) -> None:
    """Check the devices that RUN (default: runs/layers) would train on: speed, kernels, the run's
    own step, its memory, a checkpoint."""
    path = find_run(run)
    config = load_run(path)
    # JAX takes seconds to import; report mistakes in the config before that.

    from rungs.checks.device import run_check

    run_log.log_to_terminal()
    sys.exit(0 if run_check(path, config, into) else 1)


if __name__ == "__main__":
    run_command(main)

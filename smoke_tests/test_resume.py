"""Resume check: does a run that is killed and resumed end like one that is not?

    uv run smoke_tests/test_resume.py runs/layers

Trains a short copy of a run without interruption, then again with kills (SIGKILL) at random moments
of its start, steps, validations and saves. Compares parameters, optimizer state, data order and
metrics, bit for bit. Prints the first difference, and exits with code 1 if there is one. Writes
nothing into the run folder.
"""

from rungs.common.command import begin_command, run_command

import tempfile

if __name__ == "__main__":
    begin_command()

import contextlib
import sys
from pathlib import Path

import click

from rungs.cli.options import DATASETS_DIR_OPTION
from rungs.common import run_log
from rungs.config.run_config import load_any_run
from rungs.data.catalog import find_datasets_dir
from rungs.run.folder import RunFolder, find_run

TRAIN_COMMAND = [sys.executable, str(Path(__file__).with_name("train_with_batch_log.py"))]


@click.command()
@click.argument("run")
@click.option(
    "--kills", type=click.IntRange(1), default=3, show_default=True, help="Number of kills."
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Shorten sequences to this many tokens. Pairs are not shortened.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Train in this new folder and keep it. Default: a temporary folder.",
)
@DATASETS_DIR_OPTION
def main(run: str, kills: int, tokens: int, keep: Path | None, datasets_dir: Path | None) -> None:
    """Train a short copy of RUN with and without kills, and compare the results bit for bit."""
    folder = RunFolder(find_run(run))
    config = load_any_run(folder.path)
    # JAX takes seconds to import; report mistakes in the config before that.

    import jax

    from rungs.checks.resume import ResumeCheck, run_check, shorten

    jax.config.update("jax_platforms", "cpu")  # leave accelerators to the training processes
    run_log.log_to_terminal()
    short = shorten(folder, config, find_datasets_dir(datasets_dir), tokens)
    with contextlib.ExitStack() as stack:
        place = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        place.mkdir(parents=True, exist_ok=keep is None)
        check = ResumeCheck(place, short, TRAIN_COMMAND)
        sys.exit(0 if run_check(folder.path, short, check, kills) else 1)


if __name__ == "__main__":
    run_command(main)

"""Does a run that is killed end where it ends by itself?

    uv run smoke_tests/test_resume.py runs/layers

Trains a short copy of a run straight through, then again with kills (SIGKILL) at random moments of
its start, its steps, its validations and its saves, and compares parameters, optimizer state, the
order of the data and the metrics, bit for bit. Exit code 1 where one differs, with the first
difference. Nothing is written into the run folder.
"""

import contextlib
import sys
import tempfile
from pathlib import Path

import click

from rungs.common import run_log
from rungs.common.errors import UserError, run_command
from rungs.config.run_config import load_run
from rungs.data.catalog import find_datasets_dir
from rungs.run.folder import RunFolder, find_run

RECORDER = [sys.executable, str(Path(__file__).with_name("recording_train.py"))]


@click.command()
@click.argument("run")
@click.option("--kills", type=click.IntRange(1), default=3, show_default=True)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="At most so many of a sequence's tokens; pairs are never cut.",
)
@click.option(
    "--keep",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A new folder for the two trainings; a temporary one without.",
)
@click.option(
    "--datasets-dir", type=click.Path(path_type=Path), help="Where datasets lie, or will."
)
def main(run: str, kills: int, tokens: int, keep: Path | None, datasets_dir: Path | None) -> None:
    """Train a short copy of RUN with kills and without, and compare."""
    folder = RunFolder(find_run(run))
    config = load_run(folder.path)
    # JAX takes seconds to import; a mistake in a config is told before that.

    import jax

    from rungs.diagnostics.resume_check.compare import Resumption, open_datasets, shortened
    from rungs.diagnostics.resume_check.table import is_same

    jax.config.update("jax_platforms", "cpu")  # an accelerator is for the trainings
    run_log.log_to_terminal()
    datasets_dir = find_datasets_dir(datasets_dir)
    short = shortened(folder, config, open_datasets(config, datasets_dir), tokens)
    with contextlib.ExitStack() as stack:
        place = _new(keep) if keep else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        resumption = Resumption(place, short, datasets_dir, RECORDER)
        sys.exit(0 if is_same(folder.path, short, resumption, kills) else 1)


def _new(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--keep {folder}: cannot be made: {error.strerror}") from None
    return folder


if __name__ == "__main__":
    run_command(main)

"""Is a run's model sound, before training it costs anything?

    uv run smoke_tests/test_model.py runs/layers

Looks at a run as it starts, on a CPU: its initial loss, that no position sees a later one and no
sequence another, that a gradient reaches every parameter, that padding and cache change nothing,
and that the real training step brings the loss of one batch to where the model can. Prints what
was measured and what is expected. Exit code 1 where a check fails. Nothing is written into the
run folder. The first time most of it is compiling: under a minute for a small run.
"""

import os
import sys
from pathlib import Path

import click

from rungs.common import run_log
from rungs.common.errors import run_command
from rungs.config.run_config import load_run
from rungs.data.catalog import find_datasets_dir
from rungs.run.folder import RunFolder, find_run


@click.command()
@click.argument("run")
@click.option(
    "--sequences",
    type=click.IntRange(1),
    help="At most so many of the run's first; 4, or 2 of a large model, where absent.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    help="At most so many of a sequence's tokens; 64, or 16 of a large model, where absent.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="At most so many in the training on one batch.",
)
@click.option(
    "--datasets-dir", type=click.Path(path_type=Path), help="Where datasets lie, or will."
)
def main(
    run: str, sequences: int | None, tokens: int | None, steps: int, datasets_dir: Path | None
) -> None:
    """Check RUN as it starts."""
    folder = RunFolder(find_run(run))
    config = load_run(folder.path)
    os.environ["JAX_PLATFORMS"] = "cpu"
    # JAX takes seconds to import; a mistake in a config is told before that.

    from rungs.diagnostics.model_check.subject import CheckLimits, admit
    from rungs.diagnostics.model_check.table import failed_checks
    from rungs.parallel import jax_setup

    run_log.log_to_terminal()
    jax_setup.enable_compilation_cache()
    limits = CheckLimits(sequences, tokens, steps)
    patient = admit(folder, config, find_datasets_dir(datasets_dir), limits)
    sys.exit(1 if failed_checks(folder.path, config, patient) else 0)


if __name__ == "__main__":
    run_command(main)

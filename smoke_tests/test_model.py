"""Model check: is a run's model sound, before you pay for training it?

    uv run smoke_tests/test_model.py runs/layers

Examines a run at its start, on a CPU: its initial loss; that no position sees a later one, and no
sequence another; that every parameter receives a gradient; that padding and the cache change
nothing; and that the real train step brings the loss of one batch down to what is possible. Prints
what was measured and what is expected. Exits with code 1 if a check fails. Writes nothing into the
run folder. The first time, compilation takes most of a minute for a small run.
"""

from rungs.common.command import begin_command, run_command

if __name__ == "__main__":
    begin_command()

import os
import sys
from pathlib import Path

import click

from rungs.cli.options import DATASETS_DIR_OPTION
from rungs.common import run_log
from rungs.config.run_config import load_run
from rungs.data.catalog import find_datasets_dir
from rungs.run.folder import RunFolder, find_run


@click.command()
@click.argument("run")
@click.option(
    "--sequences",
    type=click.IntRange(1),
    help="Number of sequences, from the start of the run. Default: 4, or 2 for a large model.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    help="Shorten sequences to this many tokens. Default: 64, or 16 for a large model.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=200,
    show_default=True,
    help="Maximum number of training steps to overfit one batch.",
)
@DATASETS_DIR_OPTION
def main(
    run: str, sequences: int | None, tokens: int | None, steps: int, datasets_dir: Path | None
) -> None:
    """Check the model of RUN before training: initial loss, causality, gradients, overfitting."""
    folder = RunFolder(find_run(run))
    config = load_run(folder.path)
    os.environ["JAX_PLATFORMS"] = "cpu"
    # JAX takes seconds to import; report mistakes in the config before that.

    from rungs.checks.checked_model import CheckedModel, check_memory, limits_for
    from rungs.checks.model import run_checks
    from rungs.checks.short_run import ShortRun
    from rungs.parallel import jax_setup

    run_log.log_to_terminal()
    jax_setup.enable_compilation_cache()
    check_memory(folder, config)
    limits = limits_for(config, sequences, tokens)
    short = ShortRun.of(folder, config, find_datasets_dir(datasets_dir), limits)
    checked = CheckedModel.of(short, steps)
    sys.exit(0 if run_checks(folder.path, config, checked) else 1)


if __name__ == "__main__":
    run_command(main)

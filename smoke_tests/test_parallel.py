"""Does a run train on many devices as on one?

    uv run smoke_tests/test_parallel.py runs/layers

Trains the first steps of a run on virtual CPU devices, in every mode and every split of the
accumulation, and prints how far loss and gradient are from those of one device, what a device
holds, and what it sends. Exit code 1 where a difference is above its tolerance; `parity.py` says
why the tolerances are what they are. Nothing is written into the run folder. The first time most
of it is compiling: minutes for a small run.
"""

import os
import subprocess
import sys
from pathlib import Path

import click

from rungs.common import run_log
from rungs.common.errors import run_command
from rungs.config.run_config import load_run
from rungs.data.catalog import find_datasets_dir
from rungs.run.folder import RunFolder, find_run

_OTHER_DEVICES = "--xla_force_host_platform_device_count="
"""An XLA flag that JAX refuses beside its own setting."""


@click.command()
@click.argument("run")
@click.option("--devices", type=click.IntRange(2), default=8, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=2, show_default=True)
@click.option(
    "--sequences",
    type=click.IntRange(2),
    default=16,
    show_default=True,
    help="At most so many of a step's sequences.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="At most so many of a sequence's tokens.",
)
@click.option(
    "--datasets-dir", type=click.Path(path_type=Path), help="Where datasets lie, or will."
)
def main(
    run: str, devices: int, steps: int, sequences: int, tokens: int, datasets_dir: Path | None
) -> None:
    """Train the first steps of RUN in every way that devices can share them, and compare."""
    folder = RunFolder(find_run(run))
    config = load_run(folder.path)
    _start_again_with(devices)
    # JAX takes seconds to import, which the program that starts again can spare.

    from rungs.diagnostics.parallel_check.table import is_all_alike
    from rungs.diagnostics.parallel_check.trial import Trial, TrialLimits
    from rungs.parallel import jax_setup

    run_log.log_to_terminal()
    jax_setup.enable_compilation_cache()
    limits = TrialLimits(steps, sequences, tokens)
    trial = Trial.of_run(folder, config, find_datasets_dir(datasets_dir), limits)
    sys.exit(0 if is_all_alike(folder.path, config, trial, devices) else 1)


def _start_again_with(devices: int) -> None:
    """Start this program anew, so that JAX has so many virtual CPU devices, unless it has."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if not flag.startswith(_OTHER_DEVICES)]
    needed = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "XLA_FLAGS": " ".join(flags),
    }
    if any(os.environ.get(key) != value for key, value in needed.items()):
        command = [sys.executable, *sys.orig_argv[1:]]
        sys.exit(subprocess.run(command, env=os.environ | needed, check=False).returncode)


if __name__ == "__main__":
    run_command(main)

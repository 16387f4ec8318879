"""Parallel check: does a run train the same on many devices as on one?

    uv run smoke_tests/test_parallel.py runs/layers

Trains the first steps of a run on virtual CPU devices, in every sharding mode and every split of
the gradient accumulation. Prints how far loss, gradient and the optimizer's update are from those
of one device, and how many bytes a device holds. Exits with code 1 if a difference exceeds its
tolerance; `rungs/checks/parallel.py` explains the tolerances. Writes nothing into the run folder.
The first time, compilation takes minutes even for a small run.
"""

from rungs.common.command import begin_command, run_command

if __name__ == "__main__":
    begin_command()

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from rungs.cli.options import DATASETS_DIR_OPTION
from rungs.common import run_log
from rungs.config.run_config import (
    REINFORCE_FILE,
    config_files,
    load_reinforcement_run,
    load_run,
)
from rungs.data.catalog import find_datasets_dir
from rungs.run.folder import RunFolder, find_run

_XLA_DEVICE_COUNT = "--xla_force_host_platform_device_count="
"""An XLA flag that conflicts with JAX's own setting."""


@click.command()
@click.argument("run")
@click.option(
    "--devices",
    type=click.IntRange(2),
    default=8,
    show_default=True,
    help="Number of virtual devices.",
)
@click.option(
    "--steps", type=click.IntRange(1), default=2, show_default=True, help="Steps to train."
)
@click.option(
    "--sequences",
    type=click.IntRange(2),
    default=16,
    show_default=True,
    help="Maximum number of sequences per step.",
)
@click.option(
    "--tokens",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    help="Shorten sequences to this many tokens.",
)
@DATASETS_DIR_OPTION
def main(
    run: str, devices: int, steps: int, sequences: int, tokens: int, datasets_dir: Path | None
) -> None:
    """Train the first steps of RUN in every sharding mode, and compare losses, gradients and
    updates with one device's. Of a run of reinforcement learning, whose code it then trusts,
    sample and update once in dp and fsdp."""
    folder = RunFolder(find_run(run))
    is_policy = config_files(folder.path)[1] == REINFORCE_FILE
    config: Any = (load_reinforcement_run if is_policy else load_run)(folder.path)
    _restart_with(devices)
    # JAX takes seconds to import, which the process before the restart can spare.

    from rungs.checks import parallel_policy
    from rungs.checks.parallel import ParallelCheck, run_check
    from rungs.checks.short_run import Limits, ShortRun
    from rungs.objectives.table import objective_of
    from rungs.parallel import jax_setup

    run_log.log_to_terminal()
    jax_setup.enable_compilation_cache()
    if is_policy:
        sys.exit(0 if parallel_policy.run_check(folder, config, devices, sequences) else 1)
    limits = Limits(steps, min(sequences, config.train.sequences_per_step), tokens)
    datasets, objective = find_datasets_dir(datasets_dir), objective_of(config.train)
    check = ParallelCheck.of(ShortRun.of(folder, config, datasets, limits, objective))
    sys.exit(0 if run_check(folder.path, config, check, devices) else 1)


def _restart_with(devices: int) -> None:
    """Run this program again in a process where JAX has this many virtual CPU devices, unless it
    has them already."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if not flag.startswith(_XLA_DEVICE_COUNT)]
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

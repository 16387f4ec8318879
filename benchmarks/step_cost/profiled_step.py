"""A run's step on the first GPU, or the CPU, part by part, as JAX's profiler measures it.

Takes steps on random tokens, first without the profiler and then with it. A kernel counts for the
part of the model that it belongs to. Kernels that run beside others count in full, so the sum may
be more than the step.
"""

from rungs.common.command import run_command

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
import jax
from jax.profiler import ProfileData
from jax.sharding import Mesh

from benchmarks.report import spread
from rungs.checks.device import on_mesh
from rungs.checks.device_step import RunningStep, release
from rungs.common.shown_text import align_columns
from rungs.config.run_config import RunConfig, load_run
from rungs.config.sharding_config import ShardingConfig
from rungs.optim.precision import dtype_of
from rungs.parallel import jax_setup
from rungs.parallel.sharding import one_device
from rungs.planning.flops import training_flops_per_token
from rungs.planning.hardware import device_of_kind
from rungs.planning.profile import (
    OTHER,
    Kernel,
    kernels_in,
    part_by_name,
    seconds_by_part,
)
from rungs.planning.program import Module
from rungs.step.state import copy_bytes

WARM_UP = 3


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@click.option("--steps", default=5, show_default=True, type=click.IntRange(1), help="In a turn.")
@click.option(
    "--kernels",
    default=0,
    type=click.IntRange(0),
    help="Also list this many of the longest kernels.",
)
def main(run: Path, turns: int, steps: int, kernels: int) -> None:
    """Print how long RUN's step takes, and how long each part of it."""
    config = load_run(run)
    alone = ShardingConfig(mode="dp", data=1)
    config = config._replace(train=config.train.model_copy(update={"sharding": alone}))
    found = measure(config, turns, steps)
    click.echo(f"{run} on {found.device}: {found.tokens:,} tokens a step")
    click.echo(f"seconds of a step: {spread(found.seconds, 4)}")
    if found.utilization is not None:
        click.echo(f"model FLOPs utilization: {found.utilization:.1%}")
    click.echo(f"\n{table(found)}")
    if kernels:
        click.echo(f"\n{longest_table(found, kernels)}")


class Profile(NamedTuple):
    """A measured step."""

    device: str
    tokens: int
    """Of a step."""
    seconds: list[float]
    """Of a step in each turn, without the profiler."""
    kernels: list[Kernel]
    """Of all profiled steps."""
    steps: int
    """How many were profiled."""
    part_by_name: Mapping[str, str]
    peak_seconds: float | None
    """Of the model FLOPs of a step at the device's peak; None without published figures."""

    @property
    def utilization(self) -> float | None:
        """Model FLOPs utilization; None for a device without published figures."""
        return self.peak_seconds and self.peak_seconds / statistics.median(self.seconds)

    @property
    def seconds_by_part(self) -> dict[str, float]:
        """Measured, of a step; in the order of the parts."""
        seconds = seconds_by_part(self.kernels, self.part_by_name)
        return {part: each / self.steps for part, each in seconds.items()}


def measure(config: RunConfig, turns: int, steps: int) -> Profile:
    """Take steps without the profiler, then with it.

    Args:
        config: of the run, for one device.

    Raises:
        ClickException: the profiler saw nothing.
    """
    jax_setup.prepare(config.train, partial(copy_bytes, config))
    mesh = one_device()
    device = mesh.devices.flat[0]
    jax_setup.settle(device.platform)
    config = on_mesh(config, mesh)
    seconds = unprofiled(config, mesh, turns, steps)
    # the profiler does not see inside CUDA graphs
    options = {"xla_gpu_enable_command_buffer": ""} if device.platform == "gpu" else {}
    step = RunningStep.create(config, mesh, **options)
    module = Module.parse(step.compiled.compiled.as_text())
    found = profiled(step, steps, module)
    if not found:
        raise click.ClickException(f"the profiler saw no kernels on {device.device_kind}")
    hardware = device_of_kind(device.device_kind)
    peak = hardware and hardware.peak(dtype_of(config.train))
    flops = training_flops_per_token(config) * config.tokens_per_step
    return Profile(
        device.device_kind,
        config.tokens_per_step,
        seconds,
        found,
        steps,
        part_by_name(module),
        flops / peak if peak else None,
    )


def unprofiled(config: RunConfig, mesh: Mesh, turns: int, steps: int) -> list[float]:
    """Return the seconds of a step in each turn."""
    step = RunningStep.create(config, mesh)
    step.run(WARM_UP)
    seconds = []
    for _ in range(turns):
        begin = time.perf_counter()
        step.run(steps)
        seconds.append((time.perf_counter() - begin) / steps)
    release(step)
    return seconds


def profiled(step: RunningStep, steps: int, module: Module) -> list[Kernel]:
    """Return the kernels of all steps."""
    step.run(WARM_UP)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            step.run(steps)
        (file,) = Path(folder).rglob("*.xplane.pb")
        return kernels_in(ProfileData.from_file(str(file)), module)


def table(found: Profile) -> str:
    """Return the milliseconds of each part in a step."""
    seconds = found.seconds_by_part
    total = sum(seconds.values())
    rows = [("part", "ms", "share")]
    for part, each in (seconds | {"sum": total}).items():
        rows.append((part, f"{1e3 * each:,.2f}", f"{each / total:.1%}"))
    return align_columns(rows)


class Runs(NamedTuple):
    """All runs of a kernel in a step."""

    part: str
    kernel: str
    times: float
    seconds: float
    """Of all of them."""


def longest(found: Profile, count: int) -> list[Runs]:
    """Return the kernels that take longest in a step; unrolled layers share theirs."""
    seconds: dict[tuple[str, str], list[float]] = defaultdict(list)
    for kernel in found.kernels:
        part = found.part_by_name.get(kernel.instruction, OTHER)
        seconds[part, kernel.name].append(kernel.seconds)
    steps = found.steps
    runs = [Runs(*key, len(each) / steps, sum(each) / steps) for key, each in seconds.items()]
    return sorted(runs, key=lambda one: -one.seconds)[:count]


def longest_table(found: Profile, count: int) -> str:
    rows = [("part", "kernel", "runs", "ms")]
    for one in longest(found, count):
        rows.append((one.part, one.kernel[:60], f"{one.times:,.0f}", f"{1e3 * one.seconds:,.2f}"))
    return align_columns(rows, left=2)


if __name__ == "__main__":
    run_command(main)

"""Estimate what a run needs, compile its step for another device, or propose a ladder of runs."""

from rungs.common.command import importing

import math
import os
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import click

from rungs.cli.options import DATASETS_DIR_OPTION, PRESET_OPTION, SET_OPTION, FiniteRange
from rungs.common.errors import UserError, errors_at
from rungs.config.option_values import LADDER_RUNGS, UTILIZATION_PERCENT
from rungs.planning.hardware import DESCRIPTION_FORMAT, NAMES

if TYPE_CHECKING:
    from rungs.config import run_config
    from rungs.config.sharding_config import Mode, ShardingConfig
    from rungs.planning.forecast import Forecast
    from rungs.planning.hardware import Hardware
    from rungs.run.folder import RunFolder

_SHARDING = re.compile(r"(dp|fsdp|tp|fsdp_tp|cp):([0-9]{1,6})(?:x([0-9]{1,6}))?")


@click.command()
@click.argument("run")
@click.option(
    "--device",
    metavar=f"NAME|{DESCRIPTION_FORMAT}",
    help=f"One of {', '.join(NAMES)}; or describe another device by name, FLOP/s in bfloat16,"
    " bytes of memory that JAX may use, and memory bandwidth in bytes per second.  [default: this"
    " machine's]",
)
@click.option(
    "--sharding",
    metavar="MODE:DEVICES",
    help="For example dp:8, fsdp:8, tp:8, fsdp_tp:4x2 (data × tensor), cp:8 or cp:2x4 (data ×"
    " context).  [default: from train.json]",
)
@click.option(
    "--utilization",
    "--utilisation",
    "utilization",
    type=FiniteRange(1, 100),
    help="Assumed percentage of the devices' peak FLOP/s.  "
    f"[default: measured in the run's latest steps, else {UTILIZATION_PERCENT}]",
)
@click.option(
    "--tokens-per-second",
    type=FiniteRange(0.001),
    help="Throughput of all devices together, if you know it. Replaces --utilization.",
)
@click.option(
    "--ladder",
    "budget",
    metavar="FLOPS",
    type=FiniteRange(1e6, 1e30),
    help="Propose runs: one for this compute budget, for example 1e15, and smaller ones, each with"
    " √10 times less. The last lines of a plan say how many FLOPs fit in an hour.",
)
@click.option(
    "--rungs",
    type=click.IntRange(1, 20),
    help=f"Number of runs to propose.  [default: {LADDER_RUNGS}]",
)
@click.option(
    "--into",
    type=click.Path(path_type=Path, file_okay=False),
    help="Write the run folders of the ladder here.",
)
@click.option(
    "--compile",
    "is_compiled",
    is_flag=True,
    help="Compile the step for the device, which need not be here, and compare with the estimates."
    " Its compiler must be installed: the extra tpu, cuda or cuda12.",
)
@click.option(
    "--price-per-hour",
    type=FiniteRange(0),
    help="Price of one device for an hour, as clouds quote it, or of this machine if the device is"
    " its CPU. Adds the cost of the run, in the same currency.",
)
@PRESET_OPTION
@SET_OPTION
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@DATASETS_DIR_OPTION
def main(sharding: str | None, **given: Any) -> None:
    """Estimate what RUN needs: parameters, memory, FLOPs, tokens, disk space and time."""
    options = Options(sharding=parse_sharding(sharding) if sharding else None, **given)
    options.check()
    with importing():
        from rungs.run.folder import RunFolder, find_run

    if options.preset is None:
        sys.exit(0 if _plan(RunFolder(find_run(options.run)), options) else 1)
    from rungs.huggingface.presets import create_preset

    with create_preset(options.run, options.preset, options.settings, keep=False) as path:
        fits = _plan(RunFolder(path), options)
    sys.exit(0 if fits else 1)


class Options(SimpleNamespace):
    """The options, by the names of the parameters of Click. `sharding` is a ShardingConfig, or None
    for that of the run's config; `device` is None for the devices of this machine."""

    @property
    def is_as_recorded(self) -> bool:
        """Whether the plan is for the setup on which the run measured its own speed."""
        return self.device is None and self.sharding is None and self.utilization is None

    def check(self) -> None:
        """Raise UserError if options don't go together."""
        is_priced = self.price_per_hour is not None
        if self.budget is None and (self.rungs or self.into):
            raise UserError("--rungs and --into need --ladder")
        if self.is_compiled and self.budget is not None:
            raise UserError("--compile: compile one run; leave out --ladder")
        if is_priced and self.budget is not None:
            raise UserError("--price-per-hour: gives the cost of one run; leave out --ladder")
        if self.settings and self.preset is None:
            raise UserError("--set: needs --preset; without it, edit the run folder's files")


def _plan(folder: "RunFolder", options: Options) -> bool:
    """Print the plan of a run, or a ladder; return whether it fits."""
    with importing():
        from rungs.config import run_config
        from rungs.config.reinforce_config import ReinforceConfig

    config = run_config.load_any_run(folder.path)
    is_policy = isinstance(config.train, ReinforceConfig)
    if is_policy and (options.tokens_per_second or options.budget or options.is_compiled):
        raise UserError(
            "--tokens-per-second, --ladder and --compile: not for runs of reinforcement learning"
        )
    for line in run_config.unused_keys(config) if not folder.metrics.exists() else ():
        click.echo(f"warning: {folder.path}/{line}", err=True)
    _prepare_jax(options)
    return (_plan_policy if is_policy else _plan_training)(folder, config, options)


def _prepare_jax(options: Options) -> None:
    """Set the environment variables that JAX reads at import. Planning must not allocate a device's
    memory (but report training's share of it), nor use a local device when planning for another."""
    from rungs.parallel import gpu_settings

    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    gpu_settings.set_memory_share()
    if options.device is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.is_compiled:
        from rungs.planning import compiled_step

        compiled_step.prepare()

    from rungs.parallel import jax_setup

    jax_setup.refuse_unusable()


# The functions below import what needs JAX, which takes seconds, after config errors are reported.


def _plan_training(folder: "RunFolder", config: Any, options: Options) -> bool:
    from rungs.planning import compiled_step, report
    from rungs.planning.forecast import Throughput, forecast, recorded_throughput

    throughput = None
    if options.tokens_per_second is not None:
        throughput = Throughput(options.tokens_per_second, "as given")
    elif options.is_as_recorded:
        throughput = recorded_throughput(folder)
    found = forecast(folder, config, *_setup(folder, config, options), throughput)
    found = found._replace(price_per_device_hour=options.price_per_hour)
    if options.budget is not None:
        return _propose_ladder(folder, found, options)
    compiled = None
    if options.is_compiled:
        compiled = compiled_step.compile_apart(found.config, found.hardware)
    as_json = options.as_json
    click.echo(
        report.as_json(found, compiled) if as_json else report.as_text(folder, found, compiled)
    )
    return report.fits(found, compiled)


def _plan_policy(folder: "RunFolder", config: Any, options: Options) -> bool:
    from rungs.planning import policy_plan

    setup = _setup(folder, config, options)
    plan = policy_plan.plan(folder, config, *setup, use_recorded=options.is_as_recorded)
    priced = plan.update._replace(price_per_device_hour=options.price_per_hour)
    plan = plan._replace(update=priced)
    shown = policy_plan.as_json(plan) if options.as_json else policy_plan.as_text(folder, plan)
    click.echo(shown)
    return plan.fits


def _setup(
    folder: "RunFolder", config: "run_config.AnyRunConfig", options: Options
) -> "tuple[Hardware, ShardingConfig, Path, float]":
    """Return the hardware to plan for, its sharding, the datasets folder, and the share of the peak
    FLOP/s."""
    from rungs.data.catalog import find_datasets_dir
    from rungs.planning.hardware import device_by_name, this_device

    is_here = options.device is None
    hardware = this_device() if is_here else device_by_name(options.device)
    sharding = options.sharding or _configured_sharding(folder, config, is_here)
    datasets = find_datasets_dir(options.datasets_dir)
    return hardware, sharding, datasets, (options.utilization or UTILIZATION_PERCENT) / 100


def _propose_ladder(folder: "RunFolder", forecast: "Forecast", options: Options) -> bool:
    """Print a ladder, and write it if it fits; return whether it fits."""
    from rungs.planning import ladder
    from rungs.planning.forecast import memory_on_same_devices

    count = options.rungs or LADDER_RUNGS
    rungs = ladder.propose(forecast.config, options.budget, count, forecast.datasets)
    largest = memory_on_same_devices(forecast, rungs[-1].config)
    fits = largest.total <= forecast.usable_bytes
    written = ladder.make(rungs, folder.path, options.into) if options.into and fits else []
    show = ladder.as_json if options.as_json else ladder.as_text
    click.echo(show(rungs, forecast, largest))
    for path in written:
        click.echo(path, err=options.as_json)
    return fits


def _configured_sharding(
    folder: "RunFolder", config: "run_config.AnyRunConfig", is_here: bool
) -> "ShardingConfig":
    """Return the sharding in the run's config, on this machine's devices if `is_here`."""
    import jax

    from rungs.checkpointing.checkpoint_folder import list_checkpoints
    from rungs.parallel.devices import cpu_device_count, idle_devices, resolve_sharding
    from rungs.step.state import copy_bytes

    available = None
    if is_here:
        is_cpu = jax.default_backend() == "cpu"
        saved = list_checkpoints(folder.checkpoints)
        recorded = saved[-1].meta.sharding if saved else None
        virtual = cpu_device_count(config.train, partial(copy_bytes, config), recorded)
        available = virtual if is_cpu else jax.device_count()
    with errors_at(f"{folder.path}/{config.train_file}: ", ValueError):
        sharding = resolve_sharding(config.train, available)
    if available and (line := idle_devices(config.train, math.prod(sharding.sizes), available)):
        click.echo(f"warning: {line}", err=True)
    return sharding


def parse_sharding(text: str) -> "ShardingConfig":
    """Return the sharding of `--sharding`, with both sizes given. Raises UserError if not valid."""
    from rungs.config.sharding_config import ShardingConfig, mode_problem

    match = _SHARDING.fullmatch(text)
    if match is None:
        raise UserError(f"--sharding {text}: give it as dp:8, fsdp:8, tp:8, fsdp_tp:4x2 or cp:8")
    mode, *given = match.groups()
    sizes = int(given[0]), int(given[1] or 1)
    if mode in ("tp", "cp") and given[1] is None:
        sizes = 1, sizes[0]
    if min(sizes) < 1:
        raise UserError(f"--sharding {text}: needs at least one device")
    if line := mode_problem(mode, *sizes):
        raise UserError(f"--sharding {text}: {line}")
    return ShardingConfig.of(cast("Mode", mode), sizes)

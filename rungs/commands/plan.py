"""Estimate what a run needs, compile its step for another device, or propose a ladder of runs."""

import math
import os
import re
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast, get_args

import click

from rungs.common.errors import UserError, errors_at
from rungs.common.paths import is_there
from rungs.config import run_config
from rungs.config.option_values import LADDER_RUNGS, UTILIZATION_PERCENT
from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.sharding_config import Mode, ShardingConfig, mode_problem
from rungs.config.train_config import TrainConfig
from rungs.data.catalog import find_datasets_dir
from rungs.parallel import gpu_settings
from rungs.planning.compiled import targets
from rungs.run.folder import RunFolder, find_run

if TYPE_CHECKING:
    from rungs.planning.forecast import Forecast
    from rungs.planning.hardware import Hardware


_SHARDING = re.compile(rf"({'|'.join(get_args(Mode))}):([0-9]{{1,6}})(?:x([0-9]{{1,6}}))?")


class PlanOptions(NamedTuple):
    """The options of `plan.py`."""

    run: str
    device: str | None
    """None for the devices of this machine."""
    sharding: ShardingConfig | None
    """None for the sharding of the run's config."""
    utilization: float | None
    """Percentage of the peak FLOP/s."""
    tokens_per_second: float | None
    budget: float | None
    """FLOPs of a ladder's largest run; None to plan the run itself."""
    rungs: int | None
    into: Path | None
    is_compiled: bool
    has_roofline: bool
    price_per_hour: float | None
    as_json: bool
    datasets_dir: Path | None
    preset: str | None = None
    """The published size of which a run is planned that isn't there yet."""
    settings: tuple[str, ...] = ()
    """Changes of the preset's keys."""

    @property
    def is_as_recorded(self) -> bool:
        """Whether the plan is for the setup on which the run measured its own speed."""
        return self.device is None and self.sharding is None and self.utilization is None

    @property
    def utilized_share(self) -> float:
        """Share of the peak FLOP/s to plan with: the given one or a default."""
        return (self.utilization or UTILIZATION_PERCENT) / 100

    def check(self) -> None:
        """Raise UserError if options don't go together."""
        if self.budget is None and (self.rungs or self.into):
            raise UserError("--rungs and --into need --ladder")
        if self.has_roofline and not self.is_compiled:
            raise UserError("--roofline needs --compile")
        if self.is_compiled and self.budget is not None:
            raise UserError("--compile: compile one run; leave out --ladder")
        if self.price_per_hour is not None and self.budget is not None:
            raise UserError("--price-per-hour: gives the cost of one run; leave out --ladder")
        if self.settings and self.preset is None:
            raise UserError("--set: needs --preset; without it, edit the run folder's files")

    def open_run(self) -> AbstractContextManager[Path]:
        """Find the run folder or, with a preset, create it until the context ends."""
        if self.preset is None:
            return nullcontext(find_run(self.run))
        from rungs.huggingface.presets import create_preset

        return create_preset(self.run, self.preset, self.settings, keep=False)

    def check_for_policy(self) -> None:
        """Raise UserError for options that don't apply to reinforcement learning."""
        is_priced = self.price_per_hour is not None
        if self.tokens_per_second or self.budget or self.is_compiled or is_priced:
            raise UserError(
                "--tokens-per-second, --ladder, --compile and --price-per-hour: not for runs of"
                " reinforcement learning"
            )


def plan(sharding: str | None, **given: Any) -> None:
    """Do what the options of `plan.py` ask for, and end the process with its exit code. Raises
    UserError if options don't go together, or the run is not readable."""
    options = PlanOptions(sharding=parse_sharding(sharding) if sharding else None, **given)
    options.check()
    with options.open_run() as path:
        fits = _plan(RunFolder(path), options)
    sys.exit(0 if fits else 1)


def _plan(folder: RunFolder, options: PlanOptions) -> bool:
    """Print the plan of a run; return whether it fits."""
    model, train = config = run_config.load_any_run(folder.path)
    if isinstance(train, ReinforceConfig):
        options.check_for_policy()
    for line in run_config.unused_keys(config) if not is_there(folder.metrics) else ():
        click.echo(f"warning: {folder.path}/{line}", err=True)
    _prepare_jax(options)
    if isinstance(train, ReinforceConfig):
        return _plan_policy(folder, run_config.RunConfig(model, train), options)
    assert isinstance(train, TrainConfig)
    return _plan_training(folder, run_config.RunConfig(model, train), options)


def _prepare_jax(options: PlanOptions) -> None:
    """Set the environment variables that JAX reads at import. Planning must not allocate a device's
    memory (but report training's share of it), nor use a local device when planning for another."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    gpu_settings.set_memory_share()
    if options.device is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if options.is_compiled:
        targets.prepare()

    from rungs.parallel import jax_setup

    jax_setup.refuse_unusable()


# The functions below import what needs JAX, which takes seconds, after config errors are reported.


def _plan_training(folder: RunFolder, config: run_config.RunConfig, options: PlanOptions) -> bool:
    """Print the plan of a run, or a ladder; return whether it fits."""
    from rungs.planning import report, rows

    forecast = _forecast(folder, config, options)
    if options.budget is not None:
        return _propose_ladder(folder, forecast, options.budget, options)
    compiled = bound = None
    if options.is_compiled:
        from rungs.planning.compiled import roofline, step

        compiled = step.compile_apart(forecast.config, forecast.hardware)
        bound = roofline.step_roofline(forecast, compiled) if options.has_roofline else None
    show = rows.as_json if options.as_json else rows.as_text
    click.echo(show(report.sections(folder, forecast, compiled, bound)))
    return report.fits(forecast, compiled)


def _forecast(folder: RunFolder, config: run_config.RunConfig, options: PlanOptions) -> "Forecast":
    from rungs.planning.forecast import Throughput, forecast, recorded_throughput

    throughput = None
    if options.tokens_per_second is not None:
        throughput = Throughput(options.tokens_per_second, "as given")
    elif options.is_as_recorded:
        throughput = recorded_throughput(folder)
    return forecast(
        folder,
        config,
        *_setup(folder, config, options),
        throughput,
    )._replace(price_per_device_hour=options.price_per_hour)


def _plan_policy(
    folder: RunFolder, config: run_config.ReinforceRunConfig, options: PlanOptions
) -> bool:
    """Print the plan of a run of reinforcement learning; return whether it fits."""
    from rungs.planning import policy_plan

    setup = _setup(folder, config, options)
    plan = policy_plan.plan(folder, config, *setup, use_recorded=options.is_as_recorded)
    show = policy_plan.as_json if options.as_json else policy_plan.as_text
    click.echo(show(folder, plan))
    return plan.fits


def _setup(
    folder: RunFolder, config: run_config.AnyRunConfig, options: PlanOptions
) -> "tuple[Hardware, ShardingConfig, Path, float]":
    """Return the hardware to plan for, its sharding, the datasets folder, and the share of the peak
    FLOP/s."""
    from rungs.planning.hardware import device_by_name, this_device

    is_here = options.device is None
    hardware = device_by_name(options.device) if options.device else this_device()
    sharding = options.sharding or _configured_sharding(folder, config, is_here)
    datasets = find_datasets_dir(options.datasets_dir)
    return hardware, sharding, datasets, options.utilized_share


def _propose_ladder(
    folder: RunFolder, forecast: "Forecast", budget: float, options: PlanOptions
) -> bool:
    """Print a ladder, and write it if it fits; return whether it fits."""
    from rungs.planning import rows
    from rungs.planning.forecast import memory_on_same_devices
    from rungs.scaling import ladder

    count = options.rungs or LADDER_RUNGS
    rungs = ladder.propose(forecast.config, budget, count, forecast.datasets)
    largest = memory_on_same_devices(forecast, rungs[-1].config)
    fits = largest.total <= forecast.usable_bytes
    written = ladder.make(rungs, folder.path, options.into) if options.into and fits else []
    show = rows.as_json if options.as_json else rows.as_text
    click.echo(show(ladder.sections(rungs, forecast, largest)))
    for path in written:
        click.echo(path, err=options.as_json)
    return fits


def _configured_sharding(
    folder: RunFolder, config: run_config.AnyRunConfig, is_here: bool
) -> ShardingConfig:
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


def parse_sharding(text: str) -> ShardingConfig:
    """Return the sharding of `--sharding`, with both sizes given. Raises UserError if not valid."""
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
    return ShardingConfig.of(cast(Mode, mode), sizes)

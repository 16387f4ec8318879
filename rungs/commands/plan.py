"""Estimate what a run needs, compile its step for another device, or propose a ladder of runs."""

import functools
import math
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

import click

from rungs.common.errors import UserError
from rungs.common.paths import is_there
from rungs.config.option_values import LADDER_RUNGS, UTILIZATION_PERCENT
from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import AnyRunConfig, ReinforceRunConfig, RunConfig, load_any_run
from rungs.config.sharding_config import Mode, ShardingConfig, mode_problem
from rungs.config.train_config import TrainConfig
from rungs.config.unused_keys import unused_keys
from rungs.data.catalog import find_datasets_dir
from rungs.parallel import gpu_memory
from rungs.planning.compiled import targets
from rungs.run.folder import RunFolder, find_run

if TYPE_CHECKING:
    from rungs.planning.compiled.roofline import Roofline
    from rungs.planning.compiled.step import CompiledStep
    from rungs.planning.forecast import Forecast

_SHARDING = re.compile(rf"({'|'.join(get_args(Mode))}):([0-9]{{1,6}})(?:x([0-9]{{1,6}}))?")


def plan(
    run: str,
    device: str | None,
    sharding: str | None,
    utilization: float | None,
    tokens_per_second: float | None,
    budget: float | None,
    rungs: int | None,
    into: Path | None,
    is_compiled: bool,
    has_roofline: bool,
    price_per_hour: float | None,
    as_json: bool,
    datasets_dir: Path | None,
) -> None:
    """Do what the options of `plan.py` ask for, and end the process with its exit code.

    Raises:
        UserError: options don't go together, or the run is not readable.
    """
    if budget is None and (rungs or into):
        raise UserError("--rungs and --into need --ladder")
    if has_roofline and not is_compiled:
        raise UserError("--roofline needs --compile")
    if is_compiled and budget is not None:
        raise UserError("--compile: compile one run; leave out --ladder")
    if price_per_hour is not None and budget is not None:
        raise UserError("--price-per-hour: gives the cost of one run; leave out --ladder")
    numbers = utilization, tokens_per_second, budget, price_per_hour
    if not all(math.isfinite(given or 0) for given in numbers):
        raise UserError(
            "--utilization, --tokens-per-second, --ladder and --price-per-hour need finite numbers"
        )
    folder = RunFolder(find_run(run))
    config = load_any_run(folder.path)
    model, train = config
    if isinstance(train, ReinforceConfig) and (
        tokens_per_second or budget or is_compiled or price_per_hour
    ):
        raise UserError(
            "--tokens-per-second, --ladder, --compile and --price-per-hour: not for runs of"
            " reinforcement learning"
        )
    for line in unused_keys(config) if not is_there(folder.metrics) else ():
        click.echo(f"warning: {folder.path}/{line}", err=True)
    requested = parse_sharding(sharding) if sharding else None
    # JAX must not allocate a device's memory, but report the share that training would have, and
    # must not use a device if another is planned for.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    gpu_memory.set_share()
    if device is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
    if is_compiled:
        targets.prepare()
    # Imported late because JAX takes seconds to import; config errors are reported before that.

    from rungs.planning import report

    datasets = find_datasets_dir(datasets_dir)
    if isinstance(train, ReinforceConfig):
        policy_run = RunConfig(model, train)
        sys.exit(
            _plan_policy(folder, policy_run, device, requested, utilization, as_json, datasets)
        )
    assert isinstance(train, TrainConfig)
    forecast = _forecast(
        folder, RunConfig(model, train), device, requested, utilization, tokens_per_second, datasets
    )._replace(price_per_device_hour=price_per_hour)
    if budget is not None:
        fits = _propose_ladder(folder, forecast, budget, rungs or LADDER_RUNGS, into, as_json)
    else:
        compiled = _compile(forecast) if is_compiled else None
        show = report.as_json if as_json else functools.partial(report.as_text, folder)
        bound = _bound(forecast, compiled) if compiled and has_roofline else None
        click.echo(show(forecast, compiled, bound))
        fits = report.fits(forecast, compiled)
    sys.exit(0 if fits else 1)


def _forecast(
    folder: RunFolder,
    config: RunConfig,
    device: str | None,
    sharding: ShardingConfig | None,
    utilization: float | None,
    tokens_per_second: float | None,
    datasets_dir: Path,
) -> "Forecast":
    from rungs.planning import hardware
    from rungs.planning.forecast import Throughput, forecast, recorded_throughput

    throughput = None
    if tokens_per_second is not None:
        throughput = Throughput(tokens_per_second, "as given")
    elif device is None and sharding is None and utilization is None:
        throughput = recorded_throughput(folder)
    return forecast(
        folder,
        config,
        hardware.this_device() if device is None else hardware.device_by_name(device),
        sharding or _configured_sharding(folder, config, is_here=device is None),
        datasets_dir,
        (utilization or UTILIZATION_PERCENT) / 100,
        throughput,
    )


def _plan_policy(
    folder: RunFolder,
    config: ReinforceRunConfig,
    device: str | None,
    sharding: ShardingConfig | None,
    utilization: float | None,
    as_json: bool,
    datasets_dir: Path,
) -> int:
    """Print the plan of a run of reinforcement learning; return the exit code."""
    from rungs.planning import hardware, policy_plan, policy_report

    plan = policy_plan.plan(
        folder,
        config,
        hardware.this_device() if device is None else hardware.device_by_name(device),
        sharding or _configured_sharding(folder, config, is_here=device is None),
        datasets_dir,
        (utilization or UTILIZATION_PERCENT) / 100,
        use_recorded=device is None and sharding is None and utilization is None,
    )
    click.echo(policy_report.as_json(plan) if as_json else policy_report.as_text(folder, plan))
    return 0 if plan.fits else 1


def _compile(forecast: "Forecast") -> "CompiledStep":
    from rungs.planning.compiled.step import compile_step

    return compile_step(forecast.config, forecast.hardware)


def _bound(forecast: "Forecast", compiled: "CompiledStep") -> "Roofline | None":
    from rungs.planning.compiled.roofline import step_roofline

    return step_roofline(forecast, compiled)


def _propose_ladder(
    folder: RunFolder,
    forecast: "Forecast",
    budget: float,
    count: int,
    into: Path | None,
    as_json: bool,
) -> bool:
    """Print a ladder, and write it if it fits; return whether it fits."""
    from rungs.planning.forecast import memory_on_same_devices
    from rungs.scaling import ladder

    rungs = ladder.propose(forecast.config, budget, count, forecast.datasets)
    largest = memory_on_same_devices(forecast, rungs[-1].config)
    fits = largest.total <= forecast.usable_bytes
    written = ladder.make(rungs, folder.path, into) if into and fits else []
    as_output = ladder.as_json if as_json else ladder.as_text
    click.echo(as_output(rungs, forecast, largest))
    for path in written:
        click.echo(path, err=as_json)
    return fits


def parse_sharding(text: str) -> ShardingConfig:
    """Return the sharding of `--sharding`, with both sizes given.

    Raises:
        UserError: the text is not a sharding.
    """
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


def _configured_sharding(folder: RunFolder, config: AnyRunConfig, is_here: bool) -> ShardingConfig:
    """Return the sharding that the run's config asks for, on this machine's devices if the plan is
    for them."""
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
    try:
        sharding = resolve_sharding(config.train, available)
    except ValueError as error:
        raise UserError(f"{folder.path}/{config.train_file}: {error}") from None
    if available and (line := idle_devices(config.train, math.prod(sharding.sizes), available)):
        click.echo(f"warning: {line}", err=True)
    return sharding

"""What a run will take, before it takes it: `uv run plan.py runs/layers --device h100`. And which
runs of its kind make the most of a compute budget: `uv run plan.py runs/layers --ladder 1e15`.

Exit codes: 0 it fits; 1 it does not fit into memory or on the disk; 2 something given is wrong.
Nothing is trained, and nothing written but what --into asks for.
"""

import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rungs.common.errors import UserError, run_command
from rungs.config.run_config import RunConfig, load_run
from rungs.config.train_config import ShardingConfig, mode_problem
from rungs.data.catalog import find_datasets_dir
from rungs.run.folder import RunFolder, find_run

if TYPE_CHECKING:
    from rungs.planning.forecast import Forecast

RUNGS = 5
UTILISATION = 40.0
_SHARDING = re.compile(r"(dp|fsdp|tp|fsdp_tp):([0-9]{1,6})(?:x([0-9]{1,6}))?")


@click.command()
@click.argument("run")
@click.option(
    "--device",
    metavar="NAME|NAME:FLOPS:BYTES:BANDWIDTH",
    help="h100, h200, a100, rtx3090, rtx4090, tpu-v5e, tpu-v5p, cpu; or any other: FLOPs a second"
    " in bfloat16, bytes of memory, bytes a second of that memory.  [default: this machine's]",
)
@click.option(
    "--sharding",
    metavar="MODE:DEVICES",
    help="As dp:8, fsdp:8, tp:8 or, data × tensor, fsdp_tp:4x2.  [default: as train.json says]",
)
@click.option(
    "--utilisation",
    type=click.FloatRange(1, 100),
    help="Percent of the devices' peak that the run is taken to reach.  "
    f"[default: {UTILISATION}, unless the run's own latest steps tell]",
)
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(0.001),
    help="Of all devices, where you know it, instead of that.",
)
@click.option(
    "--ladder",
    "budget",
    metavar="FLOPS",
    type=click.FloatRange(1e6, 1e30),
    help="Propose runs: one for this budget, as 1e15, and others, each for √10 times less. What an"
    " hour computes stands at the end of a plan.",
)
@click.option("--rungs", type=click.IntRange(1, 20), help=f"So many runs.  [default: {RUNGS}]")
@click.option(
    "--into", type=click.Path(path_type=Path, file_okay=False), help="Write their run folders here."
)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option(
    "--datasets-dir", type=click.Path(path_type=Path), help="Where datasets lie, or will."
)
def main(
    run: str,
    device: str | None,
    sharding: str | None,
    utilisation: float | None,
    tokens_per_second: float | None,
    budget: float | None,
    rungs: int | None,
    into: Path | None,
    as_json: bool,
    datasets_dir: Path | None,
) -> None:
    """Say what RUN will take: parameters, memory, arithmetic, tokens, disk and time."""
    if budget is None and (rungs or into):
        raise UserError("--rungs and --into go with --ladder")
    if not all(math.isfinite(given or 0) for given in (utilisation, tokens_per_second, budget)):
        raise UserError("--utilisation, --tokens-per-second and --ladder: give finite numbers")
    folder = RunFolder(find_run(run))
    config = load_run(folder.path)
    asked = parsed_sharding(sharding) if sharding else None
    # JAX is to take no memory of a device, and none at all where another is asked about.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if device is not None:
        os.environ["JAX_PLATFORMS"] = "cpu"
    # It takes seconds to import; a mistake in a config is told before that.

    from rungs.planning import report

    place = find_datasets_dir(datasets_dir)
    planned = _forecast(folder, config, device, asked, utilisation, tokens_per_second, place)
    if budget is not None:
        fits = _propose(folder, planned, budget, rungs or RUNGS, into, as_json)
    else:
        click.echo(report.as_json(planned) if as_json else report.as_text(folder, planned))
        fits = planned.fits
    sys.exit(0 if fits else 1)


def _forecast(
    folder: RunFolder,
    config: RunConfig,
    device: str | None,
    sharding: ShardingConfig | None,
    utilisation: float | None,
    tokens_per_second: float | None,
    datasets_dir: Path,
) -> "Forecast":
    from rungs.planning import hardware
    from rungs.planning.forecast import Pace, forecast, measured_pace

    pace = None
    if tokens_per_second is not None:
        pace = Pace(tokens_per_second, "as given")
    elif device is None and sharding is None and utilisation is None:
        pace = measured_pace(folder)
    return forecast(
        folder,
        config,
        hardware.at_hand() if device is None else hardware.named(device),
        sharding or _own_sharding(folder, config, is_here=device is None),
        datasets_dir,
        (utilisation or UTILISATION) / 100,
        pace,
    )


def _propose(
    folder: RunFolder,
    planned: "Forecast",
    budget: float,
    count: int,
    into: Path | None,
    as_json: bool,
) -> bool:
    """Tell a ladder, and write it where it fits; returns whether it does."""
    from rungs.planning.forecast import memory_like
    from rungs.scaling import ladder, ladder_table

    rungs = ladder.propose(planned.config, budget, count, planned.datasets)
    largest = memory_like(planned, rungs[-1].config)
    fits = largest.total <= planned.usable_bytes
    made = ladder.make(rungs, folder.path, into) if into and fits else []
    shown = ladder_table.as_json if as_json else ladder_table.as_text
    click.echo(shown(rungs, planned, largest))
    for path in made:
        click.echo(path, err=as_json)
    return fits


def parsed_sharding(text: str) -> ShardingConfig:
    """What `--sharding` asks for, both sizes given.

    Raises:
        UserError: it is none.
    """
    match = _SHARDING.fullmatch(text)
    if match is None:
        raise UserError(f"--sharding {text}: give it as dp:8, fsdp:8, tp:8 or fsdp_tp:4x2")
    mode, *sizes = match.groups()
    data, tensor = int(sizes[0]), int(sizes[1] or 1)
    if mode == "tp" and sizes[1] is None:
        data, tensor = 1, data
    if min(data, tensor) < 1:
        raise UserError(f"--sharding {text}: at least one device")
    if line := mode_problem(mode, data, tensor):
        raise UserError(f"--sharding {text}: {line}")
    return ShardingConfig.model_validate({"mode": mode, "data": data, "tensor": tensor})


def _own_sharding(folder: RunFolder, config: RunConfig, is_here: bool) -> ShardingConfig:
    """That of `train.json`, on the devices of this machine where it is planned for them."""
    import jax

    from rungs.parallel.devices import cpu_device_count, resolve_sharding

    available = None
    if is_here:
        is_cpu = jax.default_backend() == "cpu"
        available = cpu_device_count(config.train, None) if is_cpu else jax.device_count()
    try:
        return resolve_sharding(config.train, available)
    except ValueError as error:
        raise UserError(f"{folder.path}/train.json: {error}") from None


if __name__ == "__main__":
    run_command(main)

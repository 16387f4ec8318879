"""Show what a run needs before you start it: `uv run plan.py runs/layers --device h100`.

Or propose the best runs for a compute budget: `uv run plan.py runs/layers --ladder 1e15`.

Exit codes: 0 it fits; 1 it does not fit into memory or on the disk; 2 bad input. Trains nothing,
and writes nothing except the run folders of --into.
"""

from rungs.common.command import begin_command, importing, run_command

if __name__ == "__main__":
    begin_command()

from pathlib import Path
from typing import Any

import click

from rungs.commands.options import DATASETS_DIR_OPTION, PRESET_OPTION, FiniteRange
from rungs.config.option_values import LADDER_RUNGS, UTILIZATION_PERCENT
from rungs.planning.hardware import DESCRIPTION_FORMAT, NAMES


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
    " Its compiler must be installed: uv sync --extra tpu, cuda or cuda12.",
)
@click.option(
    "--roofline",
    "has_roofline",
    is_flag=True,
    help="With --compile: the least time of a step, part by part, by the FLOPs and bytes of the"
    " compiled program and the device's peaks.",
)
@click.option(
    "--price-per-hour",
    type=FiniteRange(0),
    help="Price of one device for an hour, as clouds quote it, or of this machine if the device is"
    " its CPU. Adds the cost of the run, in the same currency.",
)
@PRESET_OPTION
@click.option(
    *("--set", "settings"),
    metavar="KEY=VALUE",
    multiple=True,
    help="With --preset: change a key. Can be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
@DATASETS_DIR_OPTION
def main(**options: Any) -> None:
    """Estimate what RUN needs: parameters, memory, FLOPs, tokens, disk space and time."""
    with importing():
        from rungs.commands.plan import plan
    plan(**options)


if __name__ == "__main__":
    run_command(main)

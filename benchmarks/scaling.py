"""What sharing a step among devices costs: on paper, in compiled programs, and measured.

    uv run benchmarks/scaling.py

For Llama's 1B and 8B shapes on 8 to 4,096 devices: the bytes that a device sends in a global step,
by `traffic.py` and in the programs that XLA compiles for so many virtual CPU devices; the
arithmetic of a step by the compiler's count and by formula; where the two cross on real hardware.
Then, on two virtual devices, the time of a sharded step beside that of a plain one. Programs are
compiled by processes of their own, two at a time, as each has its own number of devices.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import click
import jax

from benchmarks import roofline
from benchmarks.roofline import HARDWARE, LinkedHardware
from benchmarks.scaling_cases import (
    HOST,
    MODELS,
    SEQUENCE,
    SIZES,
    ScalingCase,
    cases,
    formula,
    lowered_step,
)
from rungs.common.errors import run_command
from rungs.config.run_config import RunConfig
from rungs.parallel.axes import TENSOR
from rungs.parallel.mesh import create_mesh
from rungs.planning.communication import Sent, parameters, traffic

MICROBATCHES = 8
STATE_BYTES = 16
"""For each parameter its weight, two moments and a gradient, in float32."""
FOLDER = Path(__file__).parent
Programs = dict[ScalingCase, dict[str, Any]]


@click.command()
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True, help="Of meshes.")
@click.option("--turns", default=25, show_default=True, type=click.IntRange(2), help="Measured.")
@click.option("--paper-only", is_flag=True, help="Compile and measure nothing.")
def main(sizes: str, turns: int, paper_only: bool) -> None:
    """Print the tables."""
    jax.config.update("jax_num_cpu_devices", HOST)
    devices = [int(size) for size in sizes.split(",")]
    print_traffic(devices, {} if paper_only else compiled(devices))
    flops = print_arithmetic()
    for hardware in HARDWARE:
        print_balance(devices, hardware, flops)
    if not paper_only:
        print_overhead(turns)


def compiled(sizes: list[int]) -> Programs:
    """What the programs of all cases send, each size's from its own process."""
    with ThreadPoolExecutor(2) as pool:
        outputs = pool.map(lambda size: said_by("scaling_programs.py", size, MICROBATCHES), sizes)
    lines = [json.loads(line) for output in outputs for line in output.splitlines()]
    return {ScalingCase(**line["case"]): line for line in lines}


def said_by(script: str, *arguments: int) -> str:
    """What a script beside this one prints."""
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode:
        raise click.ClickException(f"{script} {arguments}: {found.stderr.strip()}")
    return found.stdout


def print_traffic(sizes: list[int], programs: Programs) -> None:
    """A line for each case: its state, and what paper and program say that it sends."""
    click.echo(f"""\
Sent by each device in a global step of A microbatches, GB; a microbatch is one sequence of
{SEQUENCE:,} tokens on each device along data, in bfloat16. State: weights, moments and gradients
at rest. Program: compiled for A={MICROBATCHES}, in so many seconds; ÷ paper takes weights outside
of the layers as gathered once a step: XLA's CPU compiler moves that out of the microbatches' loop.
""")
    columns = f"state paper A=1 {f'A={MICROBATCHES}':>9}  tensor's   program     ÷ paper  seconds"
    click.echo(f"model devices mode      mesh    {columns}")
    for case in all_cases(sizes):
        click.echo(f"{label(case)} {traffic_line(case, programs)}")
    if programs:
        most = max(program["memory_gigabytes"] for program in programs.values())
        click.echo(f"The largest compiling process took {most:.1f} GB.")
    click.echo("")


def traffic_line(case: ScalingCase, programs: Programs) -> str:
    if lines := case.layout.problems(MODELS[case.model]):
        return f"  refused: {lines[0].partition(' of sharding')[0]}"
    once, sent = (traffic(case.run(n), case.layout) for n in (1, MICROBATCHES))
    tensor = [one for one in sent if one.axes == (TENSOR,)]
    line = f"{state_gigabytes(case):8.2f} {gigabytes(once)} {gigabytes(sent)} {gigabytes(tensor)}"
    if case not in programs:
        return line
    total = sum(moved for _, _, moved in programs[case]["sent"])
    ratio = total / moved(as_compiled(sent))
    return f"{line} {total / 1e9:9.2f} {ratio:11.7f} {programs[case]['seconds']:8.1f}"


def as_compiled(sent: list[Sent]) -> list[Sent]:
    """With the gathers that XLA's CPU compiler runs once, not once for each microbatch."""
    return [one._replace(times=1) if one.purpose == "other weights" else one for one in sent]


def print_arithmetic() -> dict[str, float]:
    """A line for each model and mode on eight devices; returns FLOPs per token on one device."""
    click.echo("""\
GFLOPs per token, forwards and backwards: formula, and the compiler's count for all devices
together. It counts a loop's body once, so layers are unrolled: one, and the difference to two for
each of the others.

model devices mode      mesh    formula  compiler's   ÷ formula""")
    found: dict[str, float] = {}
    for case in [*(ScalingCase(model, "dp", 1, 1) for model in MODELS), *cases(HOST)]:
        flops, by_formula = counted_flops(case), formula(MODELS[case.model])
        found.setdefault(case.model, flops)
        click.echo(
            f"{label(case)} {by_formula / 1e9:10.2f} {flops / 1e9:11.2f} {flops / by_formula:10.4f}"
        )
    click.echo("")
    return found


def counted_flops(case: ScalingCase) -> float:
    """Per token, of all devices together."""
    mesh = create_mesh((case.data, case.tensor), devices=jax.devices()[: case.devices])

    def of_layers(layers: int) -> float:
        model, train = case.run(1)
        run = RunConfig(
            model.model_copy(update={"n_layers": layers}),
            train.model_copy(update={"scan_unroll": layers}),
        )
        analysis = lowered_step(run, mesh).cost_analysis()
        assert analysis is not None
        return float(analysis["flops"])

    one, two = of_layers(1), of_layers(2)
    total = one + (MODELS[case.model].n_layers - 1) * (two - one)
    return total * case.devices / (case.data * SEQUENCE)


def print_balance(sizes: list[int], hardware: LinkedHardware, flops: dict[str, float]) -> None:
    click.echo(f"""\
{hardware.name}: communication as a share of computing in a step of one microbatch, over inner links
and network; and the tokens from which on computing takes longer, of each device and of all. In dp
these are a step's, of however many microbatches, else one microbatch's.

model devices mode      mesh     inner   network  tokens/device   all, millions""")
    for case in all_cases(sizes):
        if not case.layout.problems(MODELS[case.model]):
            found = roofline.balance(case, hardware, flops[case.model])
            even, every = found.even_tokens, found.even_tokens * case.devices / 1e6
            fits = state_gigabytes(case) * 1e9 < hardware.memory_bytes
            click.echo(
                f"{label(case)} {found.inner:8.1%} {found.outer:8.1%} {even:14,.0f} {every:15,.2f}"
                f"{'' if fits else '  state does not fit'}"
            )
    click.echo("")


def print_overhead(turns: int) -> None:
    seconds = json.loads(said_by("scaling_overhead.py", turns))
    plain = seconds["plain"]
    click.echo(f"""\
Measured on this machine's CPU: a small Llama in float32, {turns} turns, in each every step once:
median seconds (lowest to highest), and median ratio to the plain step of the same turn (the
middle half of them). The last three share the work between two virtual devices.
""")
    for way, times in seconds.items():
        ratios = [one / other for one, other in zip(times, plain, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        spread = f"{statistics.median(times):.3f} ({min(times):.3f} to {max(times):.3f})"
        click.echo(f"{way:12} {spread:26} {middle:.2f} ({low:.2f} to {high:.2f})")


def all_cases(sizes: list[int]) -> Iterator[ScalingCase]:
    """By model, then by size."""
    return (case for model in MODELS for n in sizes for case in cases(n) if case.model == model)


def label(case: ScalingCase) -> str:
    mesh = f"{case.data}×{case.tensor}"
    return f"{case.model:5} {case.devices:7,} {case.mode:7} {mesh:>6}"


def state_gigabytes(case: ScalingCase) -> float:
    """Of each device, at rest."""
    own = parameters(MODELS[case.model], case.layout)
    parts = sum(one.size * one.layers / (case.data if one.is_gathered else 1) for one in own)
    return STATE_BYTES * parts / 1e9


def moved(sent: list[Sent]) -> int:
    return sum(one.moved_bytes for one in sent)


def gigabytes(sent: list[Sent]) -> str:
    return f"{moved(sent) / 1e9:9.2f}"


if __name__ == "__main__":
    run_command(main)

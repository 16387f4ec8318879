"""What sharing a step among devices costs: on paper, in compiled programs, and measured.

For Llama's 1B and 8B shapes on 8 to 4,096 devices: the bytes that a device sends in a global step,
by the traced step (`rungs/planning/communication.py`) and in the programs that XLA compiles for so
many virtual CPU devices; the FLOPs of a step by the compiler's count and by formula; and when
communication takes longer than computing on real hardware. Then, on two virtual devices, the time
of a sharded step compared with a plain one. Programs are compiled by processes of their own, two at
a time, as each needs its own number of devices.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

from rungs.common.command import run_command

import click
import jax

from benchmarks.device_scaling.cases import (
    HARDWARE,
    HOST,
    MODELS,
    SEQUENCE,
    SIZES,
    ScalingCase,
    cases,
)
from benchmarks.device_scaling.roofline import balance
from benchmarks.report import spread
from benchmarks.side_process import failure
from rungs.common.shown_text import align_columns
from rungs.config.run_config import RunConfig
from rungs.parallel.sharding import TENSOR, create_mesh
from rungs.planning.communication import PlannedCollective, planned_collectives
from rungs.planning.compiled_step import lower_step
from rungs.planning.flops import model_flops_per_token
from rungs.planning.hardware import Hardware
from rungs.planning.memory import FLOAT32_BYTES, bytes_per_device
from rungs.step.state import AbstractModel, shapes_of

MICROBATCHES = 8
STATE_BYTES = 16
"""Per parameter: its weight, two moments and a gradient, in float32."""
Programs = dict[ScalingCase, dict[str, Any]]


@click.command()
@click.option("--sizes", default=",".join(map(str, SIZES)), show_default=True, help="Of meshes.")
@click.option("--turns", default=25, show_default=True, type=click.IntRange(2), help="Measured.")
@click.option("--paper-only", is_flag=True, help="Compile and measure nothing.")
def main(sizes: str, turns: int, paper_only: bool) -> None:
    """Print the tables."""
    jax.config.update("jax_num_cpu_devices", HOST)
    counts = [int(size) for size in sizes.split(",")]
    # by model, then by size
    every_case = [
        case for model in MODELS for n in counts for case in cases(n) if case.model == model
    ]
    print_traffic(every_case, {} if paper_only else compile_programs(counts))
    flops = print_flops()
    for hardware in HARDWARE:
        print_balance(every_case, hardware, flops)
    if not paper_only:
        print_overhead(turns)


def compile_programs(sizes: list[int]) -> Programs:
    """Return what the programs of all cases send, each size's from its own process."""
    with ThreadPoolExecutor(2) as pool:
        outputs = pool.map(lambda n: output_of("compile_programs.py", n, MICROBATCHES), sizes)
        lines = [json.loads(line) for output in outputs for line in output.splitlines()]
    return {ScalingCase(**line["case"]): line for line in lines}


def output_of(script: str, *arguments: int) -> str:
    """Return what a script beside this one prints."""
    command = [sys.executable, str(Path(__file__).with_name(script)), *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise click.ClickException(failure(script, ended.stderr))
    return ended.stdout


def print_traffic(every_case: list[ScalingCase], programs: Programs) -> None:
    """Print a line for each case: its state, and what it sends as planned and in its program."""
    click.echo(f"""\
GB that each device sends in a global step of A microbatches; a microbatch is one sequence of
{SEQUENCE:,} tokens on each device along data, in bfloat16. State: weights, moments and gradients.
Program: compiled for A={MICROBATCHES}, in so many seconds; XLA's CPU compiler gathers weights
outside of the layers once a step, and not in each microbatch as is planned.
""")
    columns = ("state", "A=1", f"A={MICROBATCHES}", "of it tensor's")
    heading = ("", *columns, "program", "÷ planned", "seconds")
    rows = list(traffic_rows(every_case, programs))
    click.echo(align_columns([heading, *rows]))
    if programs:
        most = max(program["memory_gigabytes"] for program in programs.values())
        click.echo(f"The largest compiling process took {most:.1f} GB.")


def traffic_rows(
    every_case: Iterable[ScalingCase], programs: Programs
) -> Iterator[tuple[str, ...]]:
    for case in every_case:
        if problems := case.layout.problems(MODELS[case.model]):
            refusal = problems[0].partition(" of sharding")[0]
            yield (f"{case} refused: {refusal}", *[""] * 7)
            continue
        once, sent = (planned_collectives(case.run(n), case.layout) for n in (1, MICROBATCHES))
        by_tensor = [one for one in sent if one.axes == (TENSOR,)]
        sizes = state_bytes(case), moved(once), moved(sent), moved(by_tensor)
        program = ("", "", "")
        if case in programs:
            total = sum(size for _, _, size in programs[case]["sent"])
            ratio, seconds = total / moved(sent), programs[case]["seconds"]
            program = (f"{total / 1e9:.2f}", f"{ratio:.3f}", f"{seconds:.1f}")
        yield (str(case), *(f"{size / 1e9:.2f}" for size in sizes), *program)


def print_flops() -> dict[str, float]:
    """Print a line for each model and mode on eight devices; return FLOPs per token on one."""
    counted: dict[str, float] = {}
    rows = []
    for case in [*(ScalingCase(model, "dp", 1, 1) for model in MODELS), *cases(HOST)]:
        model = MODELS[case.model]
        flops = counted_flops(case)
        formula = model_flops_per_token(shapes_of(model), model, model.context_length)
        counted.setdefault(case.model, flops)
        rows.append(
            (str(case), f"{formula / 1e9:.2f}", f"{flops / 1e9:.2f}", f"{flops / formula:.4f}")
        )
    click.echo(f"""
GFLOPs per token, forward and backward: by formula, and the compiler's count for all devices
together. It counts a loop's body once, so layers are unrolled: one, and the difference to two for
each of the others.

{align_columns([("", "formula", "compiler", "÷ formula"), *rows])}""")
    return counted


def counted_flops(case: ScalingCase) -> float:
    """Return the compiler's count per token, for all devices together."""
    mesh = create_mesh((case.data, case.tensor), devices=jax.devices()[: case.devices])

    def with_layers(layers: int) -> float:
        model, train = case.run(1)
        run = RunConfig(
            model.model_copy(update={"n_layers": layers}),
            train.model_copy(update={"scan_unroll": layers}),
        )
        return float(lower_step(run, mesh).cost_analysis()["flops"])

    one, two = with_layers(1), with_layers(2)
    total = one + (MODELS[case.model].n_layers - 1) * (two - one)
    return total * case.devices / (case.data * SEQUENCE)


def print_balance(
    every_case: list[ScalingCase], hardware: Hardware, flops: dict[str, float]
) -> None:
    rows = []
    for case in every_case:
        if not case.layout.problems(MODELS[case.model]):
            inner, outer, even = balance(case, hardware, flops[case.model])
            every = f"{even * case.devices / 1e6:,.2f}"
            note = "" if state_bytes(case) < hardware.memory_bytes else "state does not fit"
            rows.append((str(case), f"{inner:.1%}", f"{outer:.1%}", f"{even:,.0f}", every, note))
    click.echo(f"""
{hardware.name}: communication as a share of computing in a step of one microbatch, over inner links
and network; and the number of tokens from which on computing takes longer, per device and for all.
In dp these are a step's tokens, however many microbatches it has, else one microbatch's.

{align_columns([("", "inner", "network", "tokens/device", "all, millions", ""), *rows])}""")


def print_overhead(turns: int) -> None:
    seconds: dict[str, list[float]] = json.loads(output_of("sharding_overhead.py", turns))
    rows = []
    for name, times in seconds.items():
        ratios = [one / other for one, other in zip(times, seconds["plain"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append((name, spread(times, 3), f"{middle:.2f} ({low:.2f} to {high:.2f})"))
    click.echo(f"""
Measured on this machine's CPU: a small Llama in float32, {turns} turns, each with every step once.
The ratio is to the plain step of the same turn: the median and the middle half. The last three
share the work between two virtual devices.

{align_columns([("", "seconds", "ratio"), *rows])}""")


def state_bytes(case: ScalingCase) -> float:
    """Return the bytes of each device's part of weights, moments and gradients."""
    weights = AbstractModel(MODELS[case.model], case.layout).weights
    return STATE_BYTES / FLOAT32_BYTES * bytes_per_device(weights.values())


def moved(sent: list[PlannedCollective]) -> int:
    return sum(one.moved_bytes for one in sent)


if __name__ == "__main__":
    run_command(main)

"""Tokens per second of training, compared with a plain JAX loop and with PyTorch.

Every side trains the same GPT from the same weights on the same batches of the embedded dataset, in
a process of its own.
They take turns, so that a machine which slows down slows all of them; a first turn, which compiles,
is not counted. The clock is this process's: from the request for a turn's steps to the last step's
loss. The peak is the fastest matmul of either library, before all turns or after them. uv downloads
PyTorch, unless `--torch-python` names a Python that has it.
"""

from rungs.common.command import run_command

import contextlib
import itertools
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.side_process import Side, start
from benchmarks.training_speed.initial_weights import write_weights
from benchmarks.training_speed.sides import Peaks, all_sides, measure_peaks
from benchmarks.training_speed.speed_table import Row, Shape, speed_table
from rungs.common.machine import processor
from rungs.data.build import text_dataset
from rungs.data.catalog import find_datasets_dir, open_dataset
from rungs.data.tokens.dataset import TRAIN

PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    "wider": {"width": 384, "heads": 6, "layers": 6},
    "gpt2-cpu": {
        "vocab": 50257,
        "length": 512,
        "width": 768,
        "heads": 12,
        "layers": 12,
        "microbatch": 4,
        "accumulation": 1,
        "steps": 2,
        "warm_up": 6,
        "only": ["Rungs bfloat16$", "huge pages"],
    },
    "gpt2": {
        "vocab": 50257,
        "length": 1024,
        "width": 768,
        "heads": 12,
        "layers": 12,
        "microbatch": 32,
        "one_at_a_time": True,
        "only": ["Rungs bfloat16$", "bfloat16, compiled$"],
    },
}
"""Other defaults of the options."""


def take_preset(context: click.Context, _: click.Parameter, name: str) -> None:
    context.default_map = PRESETS[name]


def count(option: str, name: str, default: int, least: int = 1) -> Callable[..., Any]:
    kind = click.IntRange(least)
    return click.option(option, name, default=default, show_default=True, type=kind)


@click.command()
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="small",
    is_eager=True,
    expose_value=False,
    callback=take_preset,
    help="Other defaults. gpt2-cpu and gpt2 have GPT-2's 124M shape, for a CPU and an accelerator.",
)
@count("--vocab-size", "vocab", 8192, least=text_dataset.VOCAB_SIZE)
@count("--context-length", "length", 256)
@count("--emb-dim", "width", 256)
@count("--n-heads", "heads", 8)
@count("--n-layers", "layers", 4)
@count("--microbatch-size", "microbatch", 8)
@count("--gradient-accumulation-steps", "accumulation", 2)
@count("--turns", "turns", 7)
@count("--steps", "steps", 5)
@count("--warm-up-steps", "warm_up", 10)
@click.option("--torch-python", help="A Python with torch and numpy, instead of uv's.")
@click.option("--without-torch", is_flag=True, help="Leave PyTorch out.")
@click.option(
    "--only", multiple=True, help="Sides whose name matches a regular expression; may be repeated."
)
@click.option(
    "--one-at-a-time/--by-turns",
    help="End each side before the next one starts, if memory does not hold them all.",
)
def main(
    microbatch: int,
    accumulation: int,
    turns: int,
    steps: int,
    warm_up: int,
    torch_python: str | None,
    without_torch: bool,
    only: tuple[str, ...],
    one_at_a_time: bool,
    **sizes: int,
) -> None:
    """Print a table of tokens per second, each the median of all turns."""
    shape = Shape(**sizes)
    if shape.width % shape.heads:
        raise click.UsageError(f"--emb-dim {shape.width} is not divisible by {shape.heads} heads")
    torch = None if without_torch else torch_command(torch_python)
    with tempfile.TemporaryDirectory() as folder:
        batches, weights = Path(folder) / "batches.npy", Path(folder) / "weights.npz"
        write_batches(batches, (accumulation, microbatch, shape.length + 1), (turns + 1) * steps)
        write_weights(weights, shape.vocab, shape.length, shape.width, shape.layers)
        sides = choose(all_sides(shape, batches, weights, torch), only)
        click.echo(processor())
        print_model(shape, microbatch, accumulation)
        before = measure_peaks(torch)
        tokens = steps * accumulation * microbatch * shape.length
        groups = [[side] for side in sides] if one_at_a_time else [sides]
        rows = [row for group in groups for row in take_turns(group, turns, steps, warm_up, tokens)]
    peak = print_peak(before, measure_peaks(torch))
    click.echo(speed_table(rows, shape.flops_per_token, peak))


def torch_command(python: str | None) -> list[str]:
    """Return the command that runs a script that needs PyTorch."""
    command = [python] if python else ["uv", "run", "--no-project", "--script"]
    if shutil.which(command[0]) is None:
        raise click.UsageError(f"{command[0]}: not found; --without-torch leaves PyTorch out")
    return command


def write_batches(path: Path, batch: tuple[int, int, int], steps: int) -> None:
    """Save the first tokens of the embedded dataset, (steps, A, B, S + 1). If it has too few there
    are fewer steps, which the sides go through again.

    Args:
        batch: A, B and S + 1.
    """
    tokens = open_dataset(text_dataset.PYTHON_STDLIB, find_datasets_dir()).tokens(TRAIN)
    each = int(np.prod(batch))
    steps = min(steps, len(tokens) // each)
    if not steps:
        raise click.UsageError(f"a step of {each:,} tokens, but the dataset has {len(tokens):,}")
    np.save(path, tokens[: steps * each].astype(np.int32).reshape(steps, *batch))


def choose(sides: list[Side], only: Sequence[str]) -> list[Side]:
    """Return the sides whose name matches one of these patterns; all if there are none."""
    found = [side for side in sides if not only or any(re.search(it, side.name) for it in only)]
    if not found:
        names = "; ".join(side.name for side in sides)
        raise click.UsageError(f"--only {' '.join(only)}: none of {names}")
    return found


def print_model(shape: Shape, microbatch: int, accumulation: int) -> None:
    model = f"L={shape.layers} layers, width d={shape.width}, {shape.heads} heads"
    click.echo(f"""\
A GPT of {model}, vocabulary {shape.vocab:,}, context T={shape.length};
{accumulation} microbatches of {microbatch} sequences a step. FLOPs per token, by formula:
6·N + 12·L·d·T = {shape.flops_per_token:,}, where N={shape.parameters:,} counts all parameters
but the two embedding tables: the head is included.""")


def print_peak(before: Peaks, after: Peaks) -> float:
    """Print the best of two measurements; return the most FLOPs per second in bfloat16."""
    best = {key: max(flops, after[key]) for key, flops in before.items()}
    cells = (f"{library} {dtype} {flops / 1e9:,.0f}" for (library, dtype), flops in best.items())
    click.echo(f"Matmuls, GFLOP/s: {', '.join(cells)}.")
    peak = max(flops for (_, dtype), flops in best.items() if dtype == "bfloat16")
    click.echo(f"The peak is the fastest in bfloat16, {peak / 1e9:,.0f}.\n")
    return peak


def take_turns(sides: list[Side], turns: int, steps: int, warm_up: int, tokens: int) -> list[Row]:
    """Start the sides, then let one train at a time.

    Args:
        steps: in a turn.
        warm_up: steps of each side that are not counted. In the first ones it compiles, and takes
            memory from the system that it keeps from then on.
        tokens: in a turn.
    """
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    losses: dict[str, float] = {}
    with contextlib.ExitStack() as stack:
        running = []
        for side in sides:
            begin = time.perf_counter()
            running.append(stack.enter_context(start(side)))
            running[-1].ask(f"{warm_up}")
            click.echo(f"{side.name}: started in {time.perf_counter() - begin:.1f} s", err=True)
        for _, process in itertools.product(range(turns), running):
            begin = time.perf_counter()
            losses[process.name] = process.ask(f"{steps}")
            rates[process.name].append(tokens / (time.perf_counter() - begin))
    return [Row(side.name, rates[side.name], losses[side.name]) for side in sides]


if __name__ == "__main__":
    run_command(main)

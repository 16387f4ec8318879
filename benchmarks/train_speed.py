"""Tokens per second of training, beside a plain loop and PyTorch, in one run.

    uv run benchmarks/train_speed.py

Every side trains the same GPT on the same batches of the embedded dataset, in a process of its own,
and they take turns, so that a machine which slows down slows all; a first turn, which compiles, is
not counted. The clock is this process's: from asking for a turn's steps to the last one's loss. The
peak is the fastest matrix product of either library, before all turns or after them. uv brings
PyTorch, or `--torch-python` names a Python that has it.
"""

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.speed_table import Row, Shape, table
from benchmarks.training_sides import Peaks, SidePlan, peaks, plans, started
from rungs.common.errors import run_command
from rungs.data import python_stdlib
from rungs.data.catalog import find_datasets_dir, open_dataset
from rungs.data.dataset import TRAIN

PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    "gpt2": {
        "vocab": 50257,
        "length": 1024,
        "width": 768,
        "heads": 12,
        "layers": 12,
        "microbatch": 32,
        "one_at_a_time": True,
    },
}
"""What differs from the options' defaults."""


def take_preset(context: click.Context, _: click.Parameter, name: str) -> None:
    context.default_map = PRESETS[name]


def count(option: str, name: str, default: int, least: int = 1) -> Callable[..., Any]:
    """An option that is a number."""
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
    help="gpt2: the defaults are GPT-2's 124M shape, for an accelerator.",
)
@count("--vocab-size", "vocab", 8192, least=python_stdlib.VOCAB_SIZE)
@count("--context-length", "length", 256)
@count("--emb-dim", "width", 256)
@count("--n-heads", "heads", 8)
@count("--n-layers", "layers", 4)
@count("--microbatch-size", "microbatch", 8)
@count("--gradient-accumulation-steps", "accumulation", 2)
@count("--turns", "turns", 7)
@count("--steps", "steps", 5)
@click.option("--torch-python", help="A Python with torch and numpy; else uv brings them.")
@click.option("--without-torch", is_flag=True, help="Leave PyTorch out.")
@click.option("--only", multiple=True, help="Sides with this in their name; may be repeated.")
@click.option(
    "--one-at-a-time/--by-turns",
    help="End each side before the next one starts, where memory holds no more.",
)
def main(
    microbatch: int,
    accumulation: int,
    turns: int,
    steps: int,
    torch_python: str | None,
    without_torch: bool,
    only: tuple[str, ...],
    one_at_a_time: bool,
    **sizes: int,
) -> None:
    """Print a table of tokens per second, each the median of all turns."""
    shape = Shape(**sizes)
    if shape.width % shape.heads:
        raise click.UsageError(f"--emb-dim {shape.width} does not divide by {shape.heads} heads")
    torch = None if without_torch else torch_command(torch_python)
    with tempfile.TemporaryDirectory() as folder:
        batches = Path(folder) / "batches.npy"
        write_batches(batches, (accumulation, microbatch, shape.length + 1), (turns + 1) * steps)
        sides = chosen(plans(shape, batches, torch), only)
        print_model(shape, microbatch, accumulation)
        before = peaks(torch)
        tokens = steps * accumulation * microbatch * shape.length
        groups = [[plan] for plan in sides] if one_at_a_time else [sides]
        rows = [row for group in groups for row in take_turns(group, turns, steps, tokens)]
    peak = print_peak(before, peaks(torch))
    click.echo(table(rows, shape.flops_per_token, peak))


def torch_command(python: str | None) -> list[str]:
    """What runs a script that needs PyTorch."""
    command = [python] if python else ["uv", "run", "--no-project", "--script"]
    if shutil.which(command[0]) is None:
        raise click.UsageError(f"{command[0]}: not found; --without-torch leaves PyTorch out")
    return command


def write_batches(path: Path, batch: tuple[int, int, int], steps: int) -> None:
    """The first tokens of the embedded dataset, (steps, A, B, S + 1); where it has too few, fewer
    steps, which the sides go through again.

    Args:
        batch: A, B and S + 1.
    """
    tokens = open_dataset(python_stdlib.NAME, find_datasets_dir()).tokens(TRAIN)
    each = int(np.prod(batch))
    steps = min(steps, len(tokens) // each)
    if not steps:
        raise click.UsageError(f"a step of {each:,} tokens, but the dataset has {len(tokens):,}")
    np.save(path, tokens[: steps * each].astype(np.int32).reshape(steps, *batch))


def chosen(sides: list[SidePlan], only: Sequence[str]) -> list[SidePlan]:
    """The sides whose name has one of these parts; all where there are none."""
    found = [side for side in sides if not only or any(part in side.name for part in only)]
    if not found:
        names = "; ".join(side.name for side in sides)
        raise click.UsageError(f"--only {' '.join(only)}: none of {names}")
    return found


def print_model(shape: Shape, microbatch: int, accumulation: int) -> None:
    model = f"L={shape.layers} layers, width d={shape.width}, {shape.heads} heads"
    click.echo(f"""\
A GPT of {model}, vocabulary {shape.vocab:,}, context T={shape.length};
{accumulation} microbatches of {microbatch} sequences a step. FLOP for each token, by formula:
6·N + 12·L·d·T = {shape.flops_per_token:,}, where N={shape.parameters:,} counts all parameters
but the two embedding tables: the head is among them.""")


def print_peak(*measured: Peaks) -> float:
    """The best of several measurements; returns the most FLOP per second in bfloat16."""
    best = {
        (library, dtype): max(found[library][dtype] for found in measured)
        for library, speeds in measured[0].items()
        for dtype in speeds
    }
    shown = (f"{library} {dtype} {speed / 1e9:,.0f}" for (library, dtype), speed in best.items())
    click.echo(f"Matrix products, GFLOP/s: {', '.join(shown)}.")
    peak = max(speed for (_, dtype), speed in best.items() if dtype == "bfloat16")
    click.echo(f"The peak is the fastest in bfloat16, {peak / 1e9:,.0f}.\n")
    return peak


def take_turns(sides: list[SidePlan], turns: int, steps: int, tokens: int) -> list[Row]:
    """Start the sides, each with a first turn that is not counted, then have one compute at a time.

    Args:
        tokens: of a turn.
    """
    with contextlib.ExitStack() as stack:
        running = []
        for plan in sides:
            side = stack.enter_context(started(plan))
            seconds, _ = side.turn(steps)
            click.echo(f"{plan.name}: started in {seconds:.1f} s", err=True)
            running.append(side)
        rounds = [[side.turn(steps) for side in running] for _ in range(turns)]
    return [
        Row(plan.name, [tokens / seconds for seconds, _ in found], found[-1][1])
        for plan, found in zip(sides, zip(*rounds, strict=True), strict=True)
    ]


if __name__ == "__main__":
    run_command(main)

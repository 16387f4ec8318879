"""Tokens per second of generation, compared with `transformers` and the bound set by memory.

A model of GPT-2's 124M shape with random weights continues prompts of 32 tokens by 64, greedily, at
several batch sizes: Rungs in float32, bfloat16 and with int8 weights, `transformers` in float32 and
bfloat16. Then all of them read a prompt of 512 tokens and add one. The sides take turns. PyTorch
and `transformers` run in a process of their own: uv downloads them, unless `--torch-python` names a
Python that has them.
"""

from rungs.common.command import run_command

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import spread
from benchmarks.side_process import Side, SideProcess, start
from rungs.common.machine import processor
from rungs.config.model_config import ModelConfig
from rungs.model.generation import Generator, Request
from rungs.model.gpt import GPT
from rungs.parallel import jax_setup

PROMPT_TOKENS, NEW_TOKENS, LONG_PROMPT = 32, 64, 512
BYTES_EACH = {"float32": 4, "bfloat16": 2, "int8": 1}
"""Of a weight, by what Rungs generates with."""
OURS: dict[str, Callable[[GPT], Generator]] = {
    "float32": Generator,
    "bfloat16": lambda model: Generator(model, jnp.bfloat16),
    "int8": lambda model: Generator(model, weight_format="int8"),
}
"""What Rungs generates with."""
THEIRS = ("float32", "bfloat16")
GPT2 = ModelConfig(
    vocab_size=50257,
    context_length=1024,
    emb_dim=768,
    n_layers=12,
    n_heads=12,
    qkv_bias=True,
    tied_embeddings=True,
)
TRANSFORMERS = Path(__file__).with_name("transformers_side.py")


class Work(NamedTuple):
    """Prompts to continue."""

    batch: int
    prompt_tokens: int
    new_tokens: int


Sides = dict[str, Callable[[Work], float]]
"""From work to the seconds it takes, by name."""


@click.command()
@click.option("--batch-sizes", default="1,2,4,8,16", show_default=True)
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@click.option("--torch-python", help="A Python with torch and transformers, instead of uv's.")
def main(batch_sizes: str, turns: int, torch_python: str | None) -> None:
    """Print tables of tokens per second, and of the time to the first token of a long prompt."""
    sizes = [int(size) for size in batch_sizes.split(",")]
    jax_setup.enable_compilation_cache()
    bandwidth = read_bandwidth()
    python = [torch_python] if torch_python else ["uv", "run", "--no-project", "--script"]
    with start(transformers(python, GPT2, max(sizes), THEIRS)) as process:
        model = GPT(GPT2, jax.random.key(0))
        ours, weights = our_sides(model, max(sizes), list(OURS)), read_weights(model)
        click.echo(processor())
        click.echo(f"memory: {bandwidth / 1e9:.1f} GB/s read, {weights / 1e6:.0f}M weights")
        sides = ours | their_sides(process, THEIRS)
        for size in sizes:
            rates = {
                name: [size * NEW_TOKENS / took for took in seconds]
                for name, seconds in take_turns(
                    sides, Work(size, PROMPT_TOKENS, NEW_TOKENS), turns
                ).items()
            }
            report(f"batch {size}, tokens/s", rates, max)
            if size == 1:
                report_bound(rates, bandwidth / weights)
        first = take_turns(sides, Work(1, LONG_PROMPT, 1), turns)
        in_ms = {name: [1000 * took for took in seconds] for name, seconds in first.items()}
        report(f"first token after {LONG_PROMPT}, ms", in_ms, min)


def read_weights(model: GPT) -> int:
    """Return how many weights each token reads: all but the position table."""
    total = sum(leaf.size for leaf in jax.tree.leaves(model))
    return total - model.config.context_length * model.config.emb_dim


def our_sides(model: GPT, rows: int, names: Sequence[str]) -> Sides:
    """Return the sides of Rungs.

    Args:
        rows: the largest batch.
        names: of `OURS`.
    """
    config = model.config
    shape = rows, config.context_length // 2
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, shape)

    def side(generator: Generator) -> Callable[[Work], float]:
        def seconds(work: Work) -> float:
            rows = prompts[: work.batch, : work.prompt_tokens].tolist()
            start = time.perf_counter()
            generator.generate(rows, Request(work.new_tokens))
            return time.perf_counter() - start

        return seconds

    return {f"Rungs {name}": side(OURS[name](model)) for name in names}


def transformers(
    python: Sequence[str], model: ModelConfig, rows: int, dtypes: Sequence[str]
) -> Side:
    """Return the process of `transformers`.

    Args:
        python: the command that runs a script that needs PyTorch.
        rows: the largest batch.
    """
    config = {
        "vocab_size": model.vocab_size,
        "n_positions": model.context_length,
        "n_embd": model.emb_dim,
        "n_layer": model.n_layers,
        "n_head": model.n_heads,
    }
    asked = {"rows": rows, "dtypes": list(dtypes), "config": config}
    return Side("transformers", [*python, str(TRANSFORMERS), json.dumps(asked)])


def their_sides(process: SideProcess, dtypes: Sequence[str]) -> Sides:
    """Return the sides of `transformers`."""

    def side(dtype: str) -> Callable[[Work], float]:
        return lambda work: float(process.ask(json.dumps([dtype, *work])))

    return {f"transformers {dtype}": side(dtype) for dtype in dtypes}


def take_turns(sides: Sides, work: Work, turns: int) -> dict[str, list[float]]:
    """Return the seconds of each side in each turn, after a first one that compiles."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(turns + 1):
        for name, side in sides.items():
            took = side(work)
            if turn:
                seconds[name].append(took)
    return seconds


def report(title: str, values: dict[str, list[float]], best_of: Callable[..., float]) -> None:
    """Print a line for each side, with its ratio to the best one of `transformers`.

    Args:
        best_of: max or min.
    """
    medians = {name: statistics.median(of_side) for name, of_side in values.items()}
    theirs = best_of(medians[f"transformers {dtype}"] for dtype in THEIRS)
    click.echo(f"\n{title}")
    for name, of_side in values.items():
        ratio = medians[name] / theirs
        click.echo(f"  {name:22} {spread(of_side, 1):28} {ratio:.2f} of their best")


def report_bound(rates: dict[str, list[float]], weights_per_second: float) -> None:
    """Print which share of the memory's bandwidth a single text uses, with the weights alone."""
    for name, each in BYTES_EACH.items():
        share = statistics.median(rates[f"Rungs {name}"]) * each / weights_per_second
        click.echo(f"  {name}: {weights_per_second / each:.0f} tokens/s possible, {share:.0%}")


def read_bandwidth() -> float:
    """Return the bytes per second at which all cores sum 1 GiB, the best of ten tries."""
    ones = jnp.ones(1 << 28, jnp.float32)
    total = jax.jit(jnp.sum)
    total(ones).block_until_ready()
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        total(ones).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return ones.nbytes / best


if __name__ == "__main__":
    run_command(main)

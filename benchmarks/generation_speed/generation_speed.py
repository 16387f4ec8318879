"""Tokens per second of generation, compared with `transformers` and the bound set by memory.

A model of GPT-2's 124M shape with random weights continues prompts of 32 tokens by 64, greedily, at
several batch sizes, in float32 and bfloat16. The sides take turns. PyTorch and `transformers` run
in a process of their own: uv downloads them, unless `--torch-python` names a Python that has them.
"""

from rungs.common.command import run_command

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import spread
from benchmarks.side_process import Side, start
from rungs.config.model_config import ModelConfig
from rungs.model.generation import Generator, Request
from rungs.model.gpt import GPT
from rungs.parallel import jax_setup

PROMPT_TOKENS, NEW_TOKENS = 32, 64
DTYPES = ("float32", "bfloat16")
BYTES_EACH = {"float32": 4, "bfloat16": 2}
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
Generate = Callable[[str, int], float]
"""From dtype and batch size to the seconds of one generation."""


@click.command()
@click.option("--batch-sizes", default="1,2,4,8,16", show_default=True)
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@click.option("--torch-python", help="A Python with torch and transformers, instead of uv's.")
def main(batch_sizes: str, turns: int, torch_python: str | None) -> None:
    """Print a table of tokens per second."""
    sizes = [int(size) for size in batch_sizes.split(",")]
    jax_setup.enable_compilation_cache()
    prompts = np.random.default_rng(0).integers(0, GPT2.vocab_size, (max(sizes), PROMPT_TOKENS))
    generators, weights = make_generators()
    bandwidth = read_bandwidth()
    click.echo(f"memory: {bandwidth / 1e9:.1f} GB/s read, {weights / 1e6:.0f}M weights")
    python = [torch_python] if torch_python else ["uv", "run", "--no-project", "--script"]
    limits = json.dumps([max(sizes), PROMPT_TOKENS, NEW_TOKENS])
    with start(Side("transformers", [*python, str(TRANSFORMERS), limits])) as process:

        def ours(dtype: str, batch: int) -> float:
            start = time.perf_counter()
            generators[dtype].generate(prompts[:batch].tolist(), Request(NEW_TOKENS))
            return time.perf_counter() - start

        def theirs(dtype: str, batch: int) -> float:
            seconds: float = process.ask(f"{dtype} {batch}")
            return seconds

        for batch in sizes:
            for dtype in DTYPES:
                bound = batch * bandwidth / (weights * BYTES_EACH[dtype])
                report(dtype, batch, bound, take_turns((ours, theirs), dtype, batch, turns))


def make_generators() -> tuple[dict[str, Generator], int]:
    """Return a generator for each dtype, and how many weights each token reads: all but the
    position table."""
    model = GPT(GPT2, jax.random.key(0))
    total = sum(leaf.size for leaf in jax.tree.leaves(model))
    read = total - GPT2.context_length * GPT2.emb_dim
    return {dtype: Generator(model, jnp.dtype(dtype)) for dtype in DTYPES}, read


def take_turns(sides: Sequence[Generate], dtype: str, batch: int, turns: int) -> list[list[float]]:
    """Return the tokens per second of each side in each turn, after a first one that compiles."""
    seconds: list[list[float]] = [[] for _ in sides]
    for turn in range(turns + 1):
        for times, side in zip(seconds, sides, strict=True):
            took = side(dtype, batch)
            if turn:
                times.append(took)
    return [[batch * NEW_TOKENS / took for took in times] for times in seconds]


def report(dtype: str, batch: int, bound: float, rates: list[list[float]]) -> None:
    """Print one line: both sides, their ratio, and ours as a share of the bound."""
    ours, theirs = (statistics.median(side) for side in rates)
    click.echo(
        f"batch {batch:2} {dtype:8}  Rungs {spread(rates[0], 1)}  transformers"
        f" {spread(rates[1], 1)}  ratio {ours / theirs:.2f}"
        f"  memory bound {bound:.0f}, {ours / bound:.0%} of it"
    )


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

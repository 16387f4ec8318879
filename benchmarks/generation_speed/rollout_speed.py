"""Tokens per second of rollouts, compared with generation without log-probabilities.

Models with random weights continue prompts of 16 tokens by 32, at temperature 1 and without stop
tokens, so that both sides do the same work. The sides take turns.
"""

from rungs.common.command import run_command

import statistics
import time
from collections.abc import Callable

import click
import jax
import numpy as np

from benchmarks.report import spread
from rungs.config.model_config import ModelConfig
from rungs.model.generation import Generator, Request
from rungs.model.gpt import GPT
from rungs.model.rollouts import RolloutRequest, RolloutSampler
from rungs.model.sampling import Sampling
from rungs.parallel import jax_setup

PROMPT_TOKENS, NEW_TOKENS = 16, 32
MODELS = {
    "tiny": {"vocab_size": 64, "emb_dim": 128, "n_layers": 4, "n_heads": 4},
    "small": {"vocab_size": 4096, "emb_dim": 256, "n_layers": 6, "n_heads": 4},
    "gpt2": {"vocab_size": 50257, "emb_dim": 768, "n_layers": 12, "n_heads": 12},
}


@click.command()
@click.option("--batch-sizes", default="16,128", show_default=True)
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@click.option("--models", default="tiny,small", show_default=True, help=f"Of {', '.join(MODELS)}.")
def main(batch_sizes: str, turns: int, models: str) -> None:
    """Print a line for each model and batch size."""
    jax_setup.enable_compilation_cache()
    for name in models.split(","):
        for batch in map(int, batch_sizes.split(",")):
            report(name, batch, turns)


def report(name: str, batch: int, turns: int) -> None:
    """Print the tokens per second of both sides, and by what factor rollouts take longer."""
    config = ModelConfig.model_validate({"context_length": 128, **MODELS[name]})
    generate, sample = sides(GPT(config, jax.random.key(0)), batch)
    seconds = np.array([(timed(generate), timed(sample)) for _ in range(turns + 1)])[1:]
    generated, sampled = (batch * NEW_TOKENS / seconds.T).tolist()
    factor = statistics.median(generated) / statistics.median(sampled)
    click.echo(
        f"{name:5} batch {batch:3}  generation {spread(generated, 0)}  rollouts"
        f" {spread(sampled, 0)} tokens/s  {factor:.2f} times as long"
    )


def sides(model: GPT, batch: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return functions that generate and that sample rollouts, each of one batch."""
    generator, sampler = Generator(model), RolloutSampler(model)
    vocabulary = model.config.vocab_size
    prompts = np.random.default_rng(0).integers(vocabulary, size=(batch, PROMPT_TOKENS)).tolist()
    request = RolloutRequest(batch, PROMPT_TOKENS, NEW_TOKENS, 1.0, ())
    numbers = [(0, row) for row in range(batch)]
    return (
        lambda: generator.generate(prompts, Request(NEW_TOKENS, Sampling(temperature=1.0))),
        lambda: sampler.sample(prompts, numbers, request),
    )


def timed(side: Callable[[], object]) -> float:
    """Return the seconds that a side takes."""
    start = time.perf_counter()
    side()
    return time.perf_counter() - start


if __name__ == "__main__":
    run_command(main)

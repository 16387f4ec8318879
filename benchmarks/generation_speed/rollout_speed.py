"""Tokens per second of rollouts: compared with generation without log-probabilities, and in turns.

Models with random weights continue prompts of 16 tokens by 32, at temperature 1 and without stop
tokens, so that two sides do the same work. In turns, a token of eight ends one, a reply of one
token follows, and only the model's tokens count. The sides take turns.
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
from rungs.model.rollouts import RolloutBatch, RolloutRequest, RolloutSampler
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
    """Print the tokens per second of each side, and relative to rollouts of one turn."""
    config = ModelConfig.model_validate({"context_length": 128, **MODELS[name]})
    three = sides(GPT(config, jax.random.key(0)), batch)
    speeds = np.array([[speed(side) for side in three] for _ in range(turns + 1)])[1:].T
    generation, rollouts, in_turns = speeds.tolist()
    relative = [statistics.median(each) / statistics.median(rollouts) for each in speeds.tolist()]
    click.echo(
        f"{name:5} batch {batch:3}  rollouts {spread(rollouts, 0)} tokens/s;"
        f" generation {spread(generation, 0)} ({relative[0]:.2f});"
        f" in turns {spread(in_turns, 0)} ({relative[2]:.2f})"
    )


def sides(model: GPT, batch: int) -> list[Callable[[], int]]:
    """Return functions that generate, and that sample rollouts of one turn and of several, each of
    one batch. They return the number of tokens."""
    generator, sampler = Generator(model), RolloutSampler(model)
    vocabulary = model.config.vocab_size
    prompts = np.random.default_rng(0).integers(vocabulary, size=(batch, PROMPT_TOKENS)).tolist()
    request = RolloutRequest(batch, PROMPT_TOKENS, NEW_TOKENS, 1.0, ())
    numbers = [(0, row) for row in range(batch)]

    def generate() -> int:
        generator.generate(prompts, Request(NEW_TOKENS, Sampling(temperature=1.0)))
        return batch * NEW_TOKENS

    def sample() -> int:
        found = RolloutBatch(sampler, prompts, numbers, request).write()
        return sum(len(one.tokens) for one in found.values())

    def in_turns() -> int:
        ends = tuple(range(0, vocabulary, 8))
        settings = request._replace(stop_tokens=ends, has_turns=True)
        texts = RolloutBatch(sampler, prompts, numbers, settings)
        room, count, replies = [NEW_TOKENS] * batch, 0, dict[int, list[int]]()
        while any(room):
            found = texts.write(replies)
            for row, new in found.items():
                count += len(new.tokens)
                room[row] -= len(new.tokens)
                room[row] -= room[row] > 0  # the reply
            replies = {row: [1] for row in found if room[row]}
        return count

    return [generate, sample, in_turns]


def speed(side: Callable[[], int]) -> float:
    """Return the tokens per second of a side."""
    start = time.perf_counter()
    return side() / (time.perf_counter() - start)


if __name__ == "__main__":
    run_command(main)

"""Tokens per second of generation with lookahead, compared with plain decoding.

The model of a run continues source code of the embedded dataset's validation split, one text at a
time. Without a run it is one of GPT-2's 124M shape with random weights: what is kept then means
nothing, but how much longer a pass takes does. Prompts are half a context long, of three kinds:

    code    the source code so far
    copies  a passage of code, the same passage again, and its beginning a third time
    noise   random tokens, at temperature 1: next to nothing that is drafted is kept

The sides take turns. "Ratio" compares the medians, "processor" the processor time, which other work
on the machine hardly changes. "Kept" is the mean number of drafted tokens that a pass after the
prefill adds to the one that plain decoding would add; "same" is how many texts are those of plain
decoding.
"""

from rungs.common.command import run_command

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import click
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.generation_speed.generation_speed import GPT2
from benchmarks.report import spread
from rungs.checkpointing.load import load_model
from rungs.data.build import text_dataset
from rungs.data.catalog import find_datasets_dir, open_dataset
from rungs.data.tokens.dataset import VALIDATION
from rungs.model.generation import Generator, Request, Texts
from rungs.model.gpt import GPT
from rungs.model.sampling import GREEDY, Sampling
from rungs.parallel import jax_setup

DTYPES = ("float32", "bfloat16")
SAMPLED = Sampling(temperature=1.0)


class Case(NamedTuple):
    """Texts to continue, and how."""

    name: str
    prompts: Texts
    sampling: Sampling


@click.command()
@click.argument("run", required=False)
@click.option("--drafts", default="4,8,16", show_default=True, help="Tokens of a draft.")
@click.option("--texts", default=4, show_default=True, type=click.IntRange(1))
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@click.option("--new-tokens", default=256, show_default=True, type=click.IntRange(2))
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(DTYPES))
def main(run: str | None, drafts: str, texts: int, turns: int, new_tokens: int, dtype: str) -> None:
    """Print a line for each kind of prompt and length of draft, with the model of RUN."""
    jax_setup.enable_compilation_cache()
    model = load_model(run) if run else GPT(GPT2, jax.random.key(0))
    generator = Generator(model, jnp.dtype(dtype))
    click.echo(f"{dtype} on {jax.devices()[0].device_kind}, {texts} texts, {turns} turns")
    lengths = [0, *map(int, drafts.split(","))]
    for case in make_cases(model, texts):
        requests = [Request(new_tokens, case.sampling, lookahead=length) for length in lengths]
        report(case, requests, generator, turns)


def make_cases(model: GPT, texts: int) -> list[Case]:
    """Return all cases; prompts are half as long as the context."""
    length, vocabulary = model.config.context_length // 2, model.config.vocab_size
    tokens = open_dataset(text_dataset.PYTHON_STDLIB, find_datasets_dir()).tokens(VALIDATION)
    starts = np.linspace(0, len(tokens) - length, texts).astype(int).tolist()
    code = [tokens[start : start + length].tolist() for start in starts]
    copies = [(row[: length * 3 // 7] * 3)[:length] for row in code]
    noise = np.random.default_rng(0).integers(vocabulary, size=(texts, length)).tolist()
    return [
        Case("code, greedy", code, GREEDY),
        Case("code, sampled", code, SAMPLED),
        Case("copies, greedy", copies, GREEDY),
        Case("noise, sampled", noise, SAMPLED),
    ]


def report(case: Case, requests: Sequence[Request], generator: Generator, turns: int) -> None:
    """Print a line for each request but the first, which is plain decoding."""
    made = [[generator.generate([row], it)[0] for row in case.prompts] for it in requests]
    seconds = np.array([[timed(generator, case, it) for it in requests] for _ in range(turns)])
    total = requests[0].new_tokens * len(case.prompts)
    (plain, plain_processor), *others = (total / seconds.transpose(1, 2, 0)).tolist()
    for request, (rates, processor), found in zip(requests[1:], others, made[1:], strict=True):
        same = sum(one == other for one, other in zip(found, made[0], strict=True))
        click.echo(
            f"{case.name:14} draft {request.lookahead:2}  plain {spread(plain, 0)}  lookahead"
            f" {spread(rates, 0)} tokens/s  ratio {ratio(rates, plain):.2f}"
            f"  processor {ratio(processor, plain_processor):.2f}"
            f"  kept {mean_kept(generator, case, request):.2f}  same {same} of {len(found)}"
        )


def ratio(values: Sequence[float], others: Sequence[float]) -> float:
    """Return the ratio of the medians."""
    return statistics.median(values) / statistics.median(others)


def timed(generator: Generator, case: Case, request: Request) -> tuple[float, float]:
    """Return the seconds that all texts take, one after another, and the processor's seconds."""
    start, used = time.perf_counter(), time.process_time()
    for row in case.prompts:
        generator.generate([row], request)
    return time.perf_counter() - start, time.process_time() - used


def mean_kept(generator: Generator, case: Case, request: Request) -> float:
    """Return how many drafted tokens a pass adds. With chunks of one token each chunk is a pass,
    the first one the prefill."""
    chunks = sum(len(list(generator.stream([row], request, 1))) for row in case.prompts)
    texts = len(case.prompts)
    return (request.new_tokens - 1) * texts / (chunks - texts) - 1


if __name__ == "__main__":
    run_command(main)

"""Seconds of the lm-evaluation-harness's requests, compared with its Hugging Face backend.

A model of GPT-2's shape with half its layers and random weights answers the log-likelihood requests
of multiple-choice items: four choices of a few words each. Both sides have the same batch size and
take turns; before, each answers all of them once, which compiles our programs. The harness's
backend runs in a process of its own: uv downloads it, unless `--torch-python` names a Python that
has it. Needs the extra `eval`.
"""

from rungs.common.command import run_command

import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.report import spread
from benchmarks.side_process import Side, start
from rungs.config.model_config import ModelConfig
from rungs.evaluation.scoring import Continuation, Scorer
from rungs.model.gpt import GPT
from rungs.parallel import jax_setup
from rungs.parallel.sharding import Layout

MODEL = ModelConfig(
    vocab_size=50257,
    context_length=1024,
    emb_dim=768,
    n_layers=6,
    n_heads=12,
    qkv_bias=True,
    tied_embeddings=True,
)
HUGGING_FACE = Path(__file__).with_name("hugging_face_side.py")


@click.command()
@click.option("--items", default=48, show_default=True, type=click.IntRange(1))
@click.option("--batch-size", default=16, show_default=True, type=click.IntRange(1))
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@click.option("--torch-python", help="A Python with lm-eval and torch, instead of uv's.")
def main(items: int, batch_size: int, turns: int, torch_python: str | None) -> None:
    """Print the seconds of both sides and their ratio."""
    jax_setup.enable_compilation_cache()
    requests = make_requests(items)
    model, float32 = GPT(MODEL, jax.random.key(0)), jnp.dtype("float32")
    scorer = Scorer(model, Layout.of(None), float32, batch_size)
    python = [torch_python] if torch_python else ["uv", "run", "--no-project", "--script"]
    asked = json.dumps({"requests": requests, "batch_size": batch_size, "layers": MODEL.n_layers})
    ours, theirs = list[float](), list[float]()
    with start(Side("Hugging Face backend", [*python, str(HUGGING_FACE)])) as process:
        process.ask(asked)
        first = seconds_of(scorer, requests)
        for _ in range(turns):
            ours.append(seconds_of(scorer, requests))
            theirs.append(process.ask(""))
    tokens = sum(len(context) + len(choice) for context, choice in requests)
    ratios = [other / own for own, other in zip(ours, theirs, strict=True)]
    click.echo(f"""\
{len(requests)} requests of {tokens / len(requests):.0f} tokens, batches of {batch_size}
Medians of {turns} turns (lowest to highest)

Rungs, seconds                 {spread(ours)}; the first time, with compilation, {first:.1f}
Hugging Face backend, seconds  {spread(theirs)}
Hugging Face ÷ Rungs           {spread(ratios)}; medians {median_ratio(theirs, ours):.2f}""")


def make_requests(items: int) -> list[tuple[list[int], list[int]]]:
    """Return the tokens of contexts and of the choices that continue them."""
    rng = np.random.default_rng(0)
    requests = []
    for _ in range(items):
        context = rng.integers(0, MODEL.vocab_size, rng.integers(20, 120)).tolist()
        for _ in range(4):
            choice = rng.integers(0, MODEL.vocab_size, rng.integers(2, 20)).tolist()
            requests.append((context, choice))
    return requests


def seconds_of(scorer: Scorer, requests: list[tuple[list[int], list[int]]]) -> float:
    begin = time.perf_counter()
    found: Any = list(scorer.scores([Continuation(*request) for request in requests]))
    assert len(found) == len(requests)
    return time.perf_counter() - begin


def median_ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(one) / statistics.median(other)


if __name__ == "__main__":
    run_command(main)

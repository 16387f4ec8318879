"""What separate documents cost, and what packing pairs gains, in a training step.

A small GPT-2 with rotary positions on one device. First the time of a step on text, with documents
joined and separate, by the length of the documents. Then tokens of pairs per second (without
padding), with a pair in each sequence and with as many as fit, by the length of the pairs. All
steps take turns.
"""

from rungs.common.command import run_command

import statistics
from collections.abc import Sequence

import click
import numpy as np

from benchmarks.one_step import TimedStep, train_config
from benchmarks.report import spread
from rungs.common.shown_text import align_columns
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig

LENGTH, ROWS = 512, 4
DOCUMENT_TOKENS = (32, 128, 512)
PAIR_TOKENS = (12, 100, 250)
MODEL = ModelConfig(
    vocab_size=4096,
    context_length=LENGTH,
    emb_dim=256,
    n_heads=4,
    n_layers=4,
    positions="rope",
)


@click.command()
@click.option("--turns", default=9, show_default=True, type=click.IntRange(1))
def main(turns: int) -> None:
    """Print both tables."""
    run = RunConfig(MODEL, train_config(ROWS, 1))
    joined = TimedStep(run)
    separate = {tokens: TimedStep(run, starts(tokens)) for tokens in DOCUMENT_TOKENS}
    steps = {0: joined, **separate}
    compiled = {tokens: step.lower().compile() for tokens, step in steps.items()}
    seconds: dict[int, list[float]] = {tokens: [] for tokens in steps}
    for turn in range(turns + 1):
        for tokens, step in steps.items():
            taken = step.seconds(compiled[tokens])
            if turn:
                seconds[tokens].append(taken)
    print_tables(turns, seconds)


def starts(tokens: int) -> np.ndarray:
    """Return starts_ABS of documents of this many tokens."""
    starts_S = np.arange(LENGTH, dtype=np.int32) // tokens * tokens
    return np.broadcast_to(starts_S, (1, ROWS, LENGTH))


def print_tables(turns: int, seconds: dict[int, list[float]]) -> None:
    joined, packed = seconds[0], seconds[DOCUMENT_TOKENS[0]]
    by_document: list[tuple[str, ...]] = [("documents", "step, ms", "÷ joined")]
    by_document.append(("joined", spread(milliseconds(joined)), ""))
    for tokens in DOCUMENT_TOKENS:
        name, own = f"separate, of {tokens} tokens", seconds[tokens]
        by_document.append((name, spread(milliseconds(own)), spread(ratios(own, joined))))
    by_pair = [("pairs of", "padded, tokens/s", "packed, tokens/s", "packed ÷ padded")]
    for tokens in PAIR_TOKENS:
        slow, fast = pair_rates(tokens, joined, packed)
        by_pair.append((f"{tokens} tokens", f"{slow:,.0f}", f"{fast:,.0f}", f"{fast / slow:.1f}"))
    click.echo(f"""\
Medians of {turns} turns (lowest to highest), {ROWS} × {LENGTH} tokens.

{align_columns(by_document)}

{align_columns(by_pair)}""")


def pair_rates(
    tokens: int, padded: Sequence[float], packed: Sequence[float]
) -> tuple[float, float]:
    """Return input tokens of pairs per second, padded and packed."""
    a_sequence = LENGTH // tokens * tokens
    return (
        ROWS * tokens / statistics.median(padded),
        ROWS * a_sequence / statistics.median(packed),
    )


def ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(one, other, strict=True)]


def milliseconds(seconds: Sequence[float]) -> list[float]:
    return [1000 * one for one in seconds]


if __name__ == "__main__":
    run_command(main)

"""How long a training step takes to compile, and to run, by number of layers.

A small model of 4 to 48 layers, scanned (`scan_unroll` 1) and unrolled (`scan_unroll` n_layers; 48
unrolled layers would take minutes). Each turn traces and compiles every step again, without a
cache. 24 unrolled layers, the slowest case, get a single turn.
"""

from rungs.common.command import run_command

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import click
import jax

from benchmarks.one_step import TimedStep, train_config
from benchmarks.report import spread
from rungs.common.shown_text import align_columns
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.model.remat import LayerLoop

DEPTHS = (4, 12, 24, 48)
STEPS = 10
"""Timed in each turn, after one that is not counted."""


class CompileCase(NamedTuple):
    layers: int
    is_unrolled: bool

    @property
    def run(self) -> RunConfig:
        model = ModelConfig(
            vocab_size=1024, context_length=64, emb_dim=64, n_layers=self.layers, n_heads=4
        )
        loop = LayerLoop("none", self.layers) if self.is_unrolled else LayerLoop("dots", 1)
        return RunConfig(model, train_config(4, 1).model_copy(update=loop.as_keys()))


class Turn(NamedTuple):
    """Seconds."""

    tracing: float
    compiling: float
    step: float


SLOWEST = CompileCase(24, is_unrolled=True)
CASES = [
    *(CompileCase(layers, is_unrolled=False) for layers in DEPTHS),
    *(CompileCase(layers, is_unrolled=True) for layers in DEPTHS if layers <= SLOWEST.layers),
]
HEADING = ("layers", "tracing, s", "compiling, s", f"÷ {DEPTHS[0]} layers", "step, ms")


@click.command()
@click.option("--turns", default=3, show_default=True, type=click.IntRange(1))
def main(turns: int) -> None:
    """Print a line for each depth, scanned and unrolled."""
    jax.config.update("jax_enable_compilation_cache", False)
    steps = {case: TimedStep(case.run) for case in CASES}
    one_turn(TimedStep(CompileCase(1, is_unrolled=False).run))  # what a process does only once
    turns_of: dict[CompileCase, list[Turn]] = defaultdict(list)
    for turn in range(turns):
        for case, step in steps.items():
            if case != SLOWEST or turn == 0:
                turns_of[case].append(one_turn(step))
    rows = [
        row(case, times, turns_of[CompileCase(DEPTHS[0], case.is_unrolled)])
        for case, times in turns_of.items()
    ]
    click.echo(f"""\
Medians of {turns} turns (lowest to highest); {SLOWEST.layers} unrolled layers have one turn.
÷ {DEPTHS[0]} layers: tracing and compiling together, relative to {DEPTHS[0]} layers.

{align_columns([HEADING, *rows])}""")


def one_turn(step: TimedStep) -> Turn:
    jax.clear_caches()
    begin = time.perf_counter()
    lowered = step.lower()
    traced = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    seconds = [step.seconds(compiled) for _ in range(STEPS + 1)]
    return Turn(traced - begin, end - traced, statistics.median(seconds[1:]))


def row(case: CompileCase, turns: Sequence[Turn], fewest_layers: Sequence[Turn]) -> tuple[str, ...]:
    tracing, compiling, step = zip(*turns, strict=True)
    return (
        f"{case.layers} {'unrolled' if case.is_unrolled else 'scanned'}",
        spread(tracing),
        spread(compiling),
        f"{start_seconds(turns) / start_seconds(fewest_layers):.2f}",
        spread([1000 * seconds for seconds in step], digits=1),
    )


def start_seconds(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.tracing + turn.compiling for turn in turns)


if __name__ == "__main__":
    run_command(main)

"""How long the train step takes to compile, and to run, by depth.

    uv run benchmarks/compile_time.py

A small model of 4 to 48 layers, scanned (`scan_unroll` 1) and unrolled (`scan_unroll` n_layers; 48
of them would take minutes). Each turn traces and compiles every step anew, with no cache; the one
that takes longest has a single turn.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import click
import jax

from benchmarks.measured_step import MeasuredStep
from benchmarks.scaling_cases import train_config
from rungs.common.errors import run_command
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig

DEPTHS = (4, 12, 24, 48)
STEPS = 10
"""Taken in each turn, after one that is not counted."""


class CompileCase(NamedTuple):
    layers: int
    is_unrolled: bool

    @property
    def run(self) -> RunConfig:
        model = ModelConfig(
            vocab_size=1024, context_length=64, emb_dim=64, n_layers=self.layers, n_heads=4
        )
        unroll = {"scan_unroll": self.layers if self.is_unrolled else 1}
        return RunConfig(model, train_config(4, 1).model_copy(update=unroll))


class Turn(NamedTuple):
    """Seconds."""

    tracing: float
    compiling: float
    step: float


LONGEST = CompileCase(24, is_unrolled=True)
CASES = [
    *(CompileCase(layers, is_unrolled=False) for layers in DEPTHS),
    *(CompileCase(layers, is_unrolled=True) for layers in DEPTHS if layers < LONGEST.layers),
    LONGEST,
]


@click.command()
@click.option("--turns", default=3, show_default=True, type=click.IntRange(1))
def main(turns: int) -> None:
    """Print a line for each depth, scanned and unrolled."""
    jax.config.update("jax_enable_compilation_cache", False)
    steps = {case: MeasuredStep(case.run) for case in CASES}
    one_turn(MeasuredStep(CompileCase(1, is_unrolled=False).run))  # what a process does only once
    found: dict[CompileCase, list[Turn]] = defaultdict(list)
    for turn in range(turns):
        for case, step in steps.items():
            if case != LONGEST or turn == 0:
                found[case].append(one_turn(step))
    click.echo(f"""\
Medians of {turns} turns (lowest to highest); of {LONGEST.layers} layers unrolled there is one.
÷ {DEPTHS[0]} layers: tracing and compiling together, beside {DEPTHS[0]} layers in the same way.

layers            tracing, s         compiling, s  ÷ {DEPTHS[0]} layers              step, ms""")
    for case, times in found.items():
        click.echo(line(case, times, found[CompileCase(DEPTHS[0], case.is_unrolled)]))


def one_turn(step: MeasuredStep) -> Turn:
    jax.clear_caches()
    begin = time.perf_counter()
    lowered = step.lowered()
    traced = time.perf_counter()
    compiled = lowered.compile()
    end = time.perf_counter()
    seconds = [step.seconds(compiled) for _ in range(STEPS + 1)]
    return Turn(traced - begin, end - traced, statistics.median(seconds[1:]))


def line(case: CompileCase, turns: Sequence[Turn], of_fewest_layers: Sequence[Turn]) -> str:
    tracing, compiling, step = zip(*turns, strict=True)
    ratio = until_compiled(turns) / until_compiled(of_fewest_layers)
    return (
        f"{case.layers:3} {'unrolled' if case.is_unrolled else 'scanned':8} {spread(tracing):>20}"
        f" {spread(compiling):>20} {ratio:11.2f}"
        f" {spread([1000 * seconds for seconds in step], digits=1):>24}"
    )


def until_compiled(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.tracing + turn.compiling for turn in turns)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Median, and where there is more than one value the lowest and the highest."""
    middle = f"{statistics.median(values):.{digits}f}"
    if len(values) == 1:
        return middle
    return f"{middle} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    run_command(main)

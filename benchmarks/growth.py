"""How the cost of a train step grows beside its arithmetic: `uv run benchmarks/growth.py`

From one small model, width, depth, context length, vocabulary and accumulation grow, each by
itself. For each size: time of a step, its arithmetic by formula (`estimate.py`), and the memory
of its compiled program. The sizes take turns. `--chart PATH` draws them.
"""

import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from benchmarks.measured_step import MeasuredStep
from benchmarks.scaling_cases import formula, train_config
from rungs.charts.drawing import BLACK, BLUE, VERMILLION, legend, line, log_ticks, styled, write_all
from rungs.common.errors import run_command
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig

BASE = ModelConfig(vocab_size=4096, context_length=128, emb_dim=128, n_layers=4, n_heads=4)
SEQUENCES = 8
ACCUMULATION = "gradient_accumulation_steps"
AXES = {
    "emb_dim": (64, 128, 256, 512),
    "n_layers": (2, 4, 8, 16),
    "context_length": (64, 128, 256, 512),
    "vocab_size": (1024, 4096, 16_384, 65_536),
    ACCUMULATION: (1, 2, 4, 8),
}
"""What grows, and the sizes it takes."""


class Cost(NamedTuple):
    """What a step costs."""

    tokens: int
    flops: int
    memory_bytes: int
    """Of the compiled step: its arguments, which are state and batch, and what comes and goes."""
    seconds: list[float]
    """Of each turn."""


class CostGrowth(NamedTuple):
    """A cost as a multiple of that of the smallest size."""

    time: float
    """Median of the turns."""
    flops: float
    memory: float


Costs = dict[str, list[Cost]]
"""Of each axis, one for each size."""


@click.command()
@click.option("--turns", default=7, show_default=True, type=click.IntRange(1))
@click.option("--chart", type=click.Path(path_type=Path, dir_okay=False), help="Draw it here.")
def main(turns: int, chart: Path | None) -> None:
    """Print a table for each axis."""
    costs = measured(turns)
    click.echo(f"{described(turns)}; × is a multiple of the smallest.\n")
    for axis, of_sizes in costs.items():
        print_axis(axis, of_sizes)
    if chart is not None:
        drawing = functools.partial(draw, title=described(turns))
        with styled("plain"):
            write_all({chart.name: drawing}, costs, chart.parent)


def described(turns: int) -> str:
    """What was measured."""
    shape = ", ".join(f"{axis} {getattr(BASE, axis):,}" for axis in AXES if axis != ACCUMULATION)
    return f"From {shape}, microbatches of {SEQUENCES}; medians of {turns} turns"


def measured(turns: int) -> Costs:
    """Every size once in each turn; a turn before them is not counted."""
    steps: dict[str, tuple[Cost, Callable[[], float]]] = {}
    costs: Costs = {axis: [] for axis in AXES}
    for axis, sizes in AXES.items():
        for size in sizes:
            run = run_of(axis, size)
            if repr(run) not in steps:  # the small run itself stands on each axis
                steps[repr(run)] = cost_and_step(run)
            costs[axis].append(steps[repr(run)][0])
    for turn in range(turns + 1):
        for cost, take_step in steps.values():
            seconds = take_step()
            if turn:
                cost.seconds.append(seconds)
    return costs


def run_of(axis: str, size: int) -> RunConfig:
    """The small run with one thing of another size."""
    if axis == ACCUMULATION:
        return RunConfig(BASE, train_config(SEQUENCES, size))
    return RunConfig(BASE.model_copy(update={axis: size}), train_config(SEQUENCES, 1))


def cost_and_step(run: RunConfig) -> tuple[Cost, Callable[[], float]]:
    """The cost of a run's step, without its seconds, and what takes one and returns them."""
    step = MeasuredStep(run)
    compiled = step.lowered().compile()
    memory = compiled.compiled.memory_analysis()
    tokens = run.train.sequences_per_step * run.model.context_length
    cost = Cost(
        tokens=tokens,
        flops=round(tokens * formula(run.model)),
        memory_bytes=memory.argument_size_in_bytes + memory.temp_size_in_bytes,
        seconds=[],
    )
    return cost, functools.partial(step.seconds, compiled)


def growths(costs: list[Cost]) -> list[CostGrowth]:
    """Each cost beside the first; times are compared turn by turn."""
    first = costs[0]
    return [
        CostGrowth(
            statistics.median(np.divide(cost.seconds, first.seconds).tolist()),
            cost.flops / first.flops,
            cost.memory_bytes / first.memory_bytes,
        )
        for cost in costs
    ]


def print_axis(axis: str, costs: list[Cost]) -> None:
    columns = f"{'step, ms':>24} {'tokens/s':>9} {'time':>7} {'FLOPs':>8} {'÷':>5}"
    click.echo(f"{axis:27} {columns} {'memory, MB':>11} {'memory':>7}")
    for size, cost, growth in zip(AXES[axis], costs, growths(costs), strict=True):
        low, middle, high = (1000 * of(cost.seconds) for of in (min, statistics.median, max))
        spread = f"{middle:.1f} ({low:.1f} to {high:.1f})"
        click.echo(
            f"{size:27,} {spread:>24} {1000 * cost.tokens / middle:9,.0f} {growth.time:6.2f}×"
            f" {growth.flops:7.2f}× {growth.time / growth.flops:5.2f}"
            f" {cost.memory_bytes / 1e6:11,.1f} {growth.memory:6.2f}×"
        )
    click.echo("")


def draw(costs: Costs, title: str) -> Figure:
    """A panel for each axis, with the same scale of multiples."""
    figure = Figure()
    panels = figure.subplots(2, 3, sharey=True).ravel()
    figure.suptitle(
        "What a train step costs, as a multiple of the smallest", x=0.01, ha="left", fontsize=14
    )
    for panel, (axis, of_sizes) in zip(panels, costs.items(), strict=False):
        lines = draw_axis(panel, axis, of_sizes)
    note = panels[-1]
    note.set_axis_off()
    text = title.replace("; ", ";\n").replace(", ", ",\n")
    note.text(0, 0.9, text, va="top", transform=note.transAxes)
    panels[0].set_yticks(log_ticks(*panels[0].get_ylim()))
    legend(figure, lines)
    return figure


def draw_axis(panel: Axes, axis: str, costs: list[Cost]) -> dict[str, Line2D]:
    sizes = np.array(AXES[axis])
    time, flops, memory = (np.array(values) for values in zip(*growths(costs), strict=True))
    panel.set_title(axis)
    panel.set(xscale="log", yscale="log")
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter("{x:g}×")
    return {
        "arithmetic, by formula": line(panel, sizes, flops, color=BLACK, linestyle="--", marker=""),
        "time, measured": line(panel, sizes, time, color=BLUE, linewidth=2),
        "memory of the compiled step": line(
            panel, sizes, memory, color=VERMILLION, linestyle="-.", marker="s"
        ),
    }


if __name__ == "__main__":
    run_command(main)

"""How the cost of a training step grows with the model, compared with its arithmetic.

Starting from one small model, width, depth, context length, vocabulary, microbatch and accumulation
grow, each by itself. For each size: the time of a step, its FLOPs by formula, and the memory of its
compiled program. The sizes take turns. `--chart PATH` draws them.
"""

from rungs.common.command import run_command

import functools
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import NullLocator

from benchmarks.one_step import TimedStep, train_config
from benchmarks.report import spread
from rungs.common.shown_text import align_columns
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.planning.flops import model_flops_per_token
from rungs.report.drawing import (
    BLACK,
    BLUE,
    VERMILLION,
    legend,
    line,
    log_ticks,
    use_style,
    write_all,
)
from rungs.step.state import shapes_of

BASE = ModelConfig(vocab_size=4096, context_length=128, emb_dim=128, n_layers=4, n_heads=4)
SEQUENCES = 8
MICROBATCH, ACCUMULATION = "microbatch_size", "gradient_accumulation_steps"
AXES = {
    "emb_dim": (64, 128, 256, 512),
    "n_layers": (2, 4, 8, 16),
    "context_length": (64, 128, 256, 512),
    "vocab_size": (1024, 4096, 16_384, 65_536),
    MICROBATCH: (4, 8, 16, 32),
    ACCUMULATION: (1, 2, 4, 8),
}
"""What grows, and the sizes it takes."""
HEADING = ("", "step, ms", "tokens/s", "time", "FLOPs", "÷", "memory, MB", "memory")


class MeasuredStep:
    """A run's compiled step and what it costs."""

    def __init__(self, run: RunConfig) -> None:
        self._step = TimedStep(run)
        self._compiled: Any = self._step.lower().compile()
        memory = self._compiled.compiled.memory_analysis()
        model = run.model
        self.tokens = run.train.sequences_per_step * model.context_length
        self.flops = self.tokens * model_flops_per_token(
            shapes_of(model), model, model.context_length
        )
        self.memory_bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        self.seconds: list[float] = []
        """Of each turn."""

    def take_turn(self) -> None:
        self.seconds.append(self._step.seconds(self._compiled))


class CostGrowth(NamedTuple):
    """A cost as a multiple of the smallest size's."""

    time: float
    flops: float
    memory: float


Costs = dict[str, list[MeasuredStep]]
"""Of each axis, one for each size."""


@click.command()
@click.option("--turns", default=7, show_default=True, type=click.IntRange(1))
@click.option("--chart", type=click.Path(path_type=Path, dir_okay=False), help="Draw it here.")
def main(turns: int, chart: Path | None) -> None:
    """Print a table for each axis."""
    costs = measure(turns)
    shape = ", ".join(f"{axis} {getattr(BASE, axis):,}" for axis in AXES if hasattr(BASE, axis))
    title = f"From {shape}, microbatches of {SEQUENCES}; medians of {turns} turns"
    click.echo(f"{title}; × is a multiple of the smallest.")
    for axis, steps in costs.items():
        click.echo(f"\n{table(axis, steps)}")
    if chart is not None:
        with use_style("plain"):
            write_all({chart.name: functools.partial(draw, title=title)}, costs, chart.parent)


def measure(turns: int) -> Costs:
    """Time every size once in each turn, after a turn that is not counted."""
    runs = {(axis, size): run_of(axis, size) for axis, sizes in AXES.items() for size in sizes}
    steps = {repr(run): MeasuredStep(run) for run in {repr(r): r for r in runs.values()}.values()}
    for _ in range(turns + 1):
        for step in steps.values():
            step.take_turn()
    for step in steps.values():
        del step.seconds[0]
    return {axis: [steps[repr(runs[axis, size])] for size in AXES[axis]] for axis in AXES}


def run_of(axis: str, size: int) -> RunConfig:
    """Return the small run with one thing of another size."""
    if axis == MICROBATCH:
        return RunConfig(BASE, train_config(size, 1))
    if axis == ACCUMULATION:
        return RunConfig(BASE, train_config(SEQUENCES, size))
    return RunConfig(BASE.model_copy(update={axis: size}), train_config(SEQUENCES, 1))


def growths(steps: list[MeasuredStep]) -> list[CostGrowth]:
    """Compare each cost with the first; times are compared turn by turn."""
    first = steps[0]
    return [
        CostGrowth(
            statistics.median(np.divide(step.seconds, first.seconds).tolist()),
            step.flops / first.flops,
            step.memory_bytes / first.memory_bytes,
        )
        for step in steps
    ]


def table(axis: str, steps: list[MeasuredStep]) -> str:
    rows = [
        (
            f"{size:,}",
            spread([1000 * seconds for seconds in step.seconds], digits=1),
            f"{step.tokens / statistics.median(step.seconds):,.0f}",
            f"{growth.time:.2f}×",
            f"{growth.flops:.2f}×",
            f"{growth.time / growth.flops:.2f}",
            f"{step.memory_bytes / 1e6:,.1f}",
            f"{growth.memory:.2f}×",
        )
        for size, step, growth in zip(AXES[axis], steps, growths(steps), strict=True)
    ]
    return align_columns([(axis, *HEADING[1:]), *rows], left=0)


def draw(costs: Costs, title: str) -> Figure:
    """Draw a panel for each axis, with the same scale of multiples."""
    figure = Figure()
    panels = figure.subplots(2, 3, sharey=True).ravel()
    heading = "What a training step costs, as a multiple of the smallest"
    figure.suptitle(f"{heading}\n{title}", x=0.01, ha="left", fontsize=11)
    for panel, (axis, steps) in zip(panels, costs.items(), strict=True):
        lines = draw_axis(panel, axis, steps)
    panels[0].set_yticks(log_ticks(*panels[0].get_ylim()))
    legend(figure, lines)
    return figure


def draw_axis(panel: Axes, axis: str, steps: list[MeasuredStep]) -> dict[str, Line2D]:
    sizes = np.array(AXES[axis])
    time, flops, memory = (np.array(values) for values in zip(*growths(steps), strict=True))
    panel.set_title(axis)
    panel.set(xscale="log", yscale="log")
    panel.set_xticks(sizes, [f"{size:,}" for size in sizes])
    panel.xaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_minor_locator(NullLocator())
    panel.yaxis.set_major_formatter("{x:g}×")
    return {
        "FLOPs, by formula": line(panel, sizes, flops, color=BLACK, linestyle="--", marker=""),
        "time, measured": line(panel, sizes, time, color=BLUE, linewidth=2),
        "memory of the compiled step": line(
            panel, sizes, memory, color=VERMILLION, linestyle="-.", marker="s"
        ),
    }


if __name__ == "__main__":
    run_command(main)

"""Right answers over minutes of reinforcement learning: the committed runs, with several seeds.

Trains `runs/NAME-pretrain` once and `runs/NAME-rl` from it with each seed, one after another, on
all of the machine, and draws the share of right answers to the held-out prompts. Minutes are those
of the steps, without start and validations. Killed and run again, the command goes on where it was.
"""

from rungs.common.command import run_command

from collections.abc import Sequence
from pathlib import Path

import click
import numpy as np
from matplotlib.figure import Figure

from benchmarks.gpu_parts import committed_run
from benchmarks.gpu_parts.answers import right_by_minute
from benchmarks.gpu_parts.setting import ROOT
from rungs.common.machine import processor
from rungs.common.shown_text import align_columns
from rungs.report import drawing
from rungs.run.derive import NewRun

TASKS = "parity", "sort", "countdown"


@click.command()
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--into", required=True, type=click.Path(path_type=Path), help="For all files.")
def main(seeds: int, into: Path) -> None:
    """Train the runs of reinforcement learning and draw their right answers by minute."""
    curves = {task: trained(task, seeds, into.resolve()) for task in TASKS}
    rows = [
        (task, f"{minutes[-1]:.1f}", f"{right[0]:.1f}%", f"{right[-1]:.1f}%")
        for task, runs in curves.items()
        for minutes, right in runs
    ]
    click.echo(processor())
    click.echo(align_columns([("task", "minutes", "before", "after"), *rows]))
    with drawing.use_style("plain"):
        drawing.write_all({"answers.png": chart}, curves, into)


def trained(task: str, seeds: int, into: Path) -> list[np.ndarray]:
    """Train a task's runs to their ends, as far as they have not ended, and return for each seed
    minutes and percentages of right answers, shape [2, validations]."""
    into.mkdir(parents=True, exist_ok=True)
    start = NewRun.of(into / f"{task}-pretrain", ROOT / "runs" / f"{task}-pretrain", {}).make()
    committed_run.train(start)
    curves = []
    for seed in range(seeds):
        changes = {"start_from": str(start), "seed": seed}
        folder, committed = into / f"{task}-rl-seed-{seed}", ROOT / "runs" / f"{task}-rl"
        run = NewRun.of(folder, committed, changes).make()
        committed_run.train(run)
        curves.append(np.asarray(list(right_by_minute(run))).T * [[1], [100]])
    return curves


def chart(curves: dict[str, Sequence[np.ndarray]]) -> Figure:
    """Draw a thin line for each seed and a thick one for their mean, named at its end."""
    title, label = "Right answers over minutes of reinforcement learning", "right answers (%)"
    figure, [axes] = drawing.new_chart(title, "minutes of steps", label)
    for (task, runs), colour in zip(curves.items(), drawing.COLOURS, strict=False):
        for minutes, right in runs:
            axes.plot(minutes, right, color=colour, linewidth=0.7, alpha=0.5)
        minutes, right = np.mean(runs, axis=0)
        axes.plot(minutes, right, color=colour, linewidth=2.2, marker="o", markersize=3)
        axes.annotate(
            f"{task}: {right[-1]:.0f}%", (minutes[-1], right[-1]), (6, 0),
            textcoords="offset points", va="center", color=colour,
        )  # fmt: skip
    axes.set_ylim(0, 100)
    axes.margins(x=0.02)
    return figure


if __name__ == "__main__":
    run_command(main)

"""Validation losses of every optimizer at the same budget, each at several learning rates.

Trains RUN with each optimizer at each of its learning rates, prints the validation loss at the end
of each training and draws it over the learning rate. The same command resumes where it was
interrupted.
"""

from rungs.common.command import run_command

import functools
from pathlib import Path

import click

from rungs.cli.grid import sweep
from rungs.data.catalog import find_datasets_dir
from rungs.planning.mup import (
    SweepRun,
    best_rates,
    is_best_at_end,
    points_by_series,
)
from rungs.report import drawing
from rungs.report.comparison_charts import sweep_chart
from rungs.run.folder import find_run

RATES = {
    "adamw": (0.001, 0.002, 0.004, 0.008, 0.016),
    "muon": (0.002, 0.004, 0.008, 0.016, 0.032),
    "lion": (0.0001, 0.0002, 0.0004, 0.0008, 0.0016),
    "adafactor": (0.001, 0.002, 0.004, 0.008, 0.016),
    "sgd": (0.0125, 0.025, 0.05, 0.1, 0.2),
}


@click.command()
@click.argument("run")
@click.option("--tokens", default=1_000_000, show_default=True, help="Per training.")
@click.option("--into", required=True, type=click.Path(path_type=Path), help="For run folders.")
@click.option("--only", multiple=True, type=click.Choice(list(RATES)), help="Some optimizers.")
@click.option("--datasets-dir", type=click.Path(path_type=Path))
def main(
    run: str, tokens: int, into: Path, only: tuple[str, ...], datasets_dir: Path | None
) -> None:
    """Train RUN with each optimizer at each of its learning rates."""
    cases = [
        SweepRun(optimizer, rate, {"optimizer": optimizer, "min_train_tokens": tokens})
        for optimizer in only or RATES
        for rate in RATES[optimizer]
    ]
    folder = find_run(run)
    points = list(sweep(folder, into, cases, find_datasets_dir(datasets_dir)))
    for optimizer, line in points_by_series(points).items():
        best = min(line, key=lambda point: point.loss)
        at_end = "  the lowest or highest rate tried" * is_best_at_end(line)
        print(f"{optimizer:10} {best.loss:.4f} at {best.learning_rate:g}{at_end}")
        print("          ", "  ".join(f"{p.learning_rate:g}: {p.loss:.4f}" for p in line))
        print(f"           lowest point of a parabola at {best_rates(line)[optimizer]:.2g}")
    draw = functools.partial(sweep_chart, f"{folder.name}: final loss by optimizer")
    with drawing.use_style("plain"):
        drawing.write_all({"optimizers.png": draw}, {"": points}, into)


if __name__ == "__main__":
    run_command(main)

"""Optimizers at the same budget: one run with each of them, at several learning rates.

    uv run benchmarks/optimizers.py runs/swiglu --tokens 1000000 --into /tmp/optimizers

Prints the validation loss at the end of each run and draws it over the learning rate. The same
command goes on where it was interrupted.
"""

import functools
from pathlib import Path

import click

from rungs.charts import drawing
from rungs.charts.sweep_chart import sweep_chart
from rungs.common.errors import run_command
from rungs.data.catalog import find_datasets_dir
from rungs.run.folder import find_run
from rungs.scaling.learning_rate_sweep import SweepRun, best_rates, is_at_end, lines_of, sweep

TRAIN = Path(__file__).parents[1] / "train.py"
RATES = {
    "adamw": (0.001, 0.002, 0.004, 0.008, 0.016),
    "muon": (0.002, 0.004, 0.008, 0.016, 0.032),
    "lion": (0.0001, 0.0002, 0.0004, 0.0008, 0.0016),
    "adafactor": (0.001, 0.002, 0.004, 0.008, 0.016),
    "sgd": (0.0125, 0.025, 0.05, 0.1, 0.2),
}


@click.command()
@click.argument("run")
@click.option("--tokens", default=1_000_000, show_default=True, help="Of each run.")
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
    points = list(sweep(folder, into, cases, find_datasets_dir(datasets_dir), TRAIN))
    for optimizer, of_it in lines_of(points).items():
        best = min(of_it, key=lambda point: point.loss)
        at_end = "  at the end of those tried" * is_at_end(of_it)
        print(f"{optimizer:10} {best.loss:.4f} at {best.learning_rate:g}{at_end}")
        print("          ", "  ".join(f"{p.learning_rate:g}: {p.loss:.4f}" for p in of_it))
        print(f"           least of the parabola at {best_rates(of_it)[optimizer]:.2g}")
    draw = functools.partial(sweep_chart, f"{folder.name}: final loss by optimizer")
    with drawing.styled("plain"):
        drawing.write_all({"optimizers.png": draw}, {"": points}, into)


if __name__ == "__main__":
    run_command(main)

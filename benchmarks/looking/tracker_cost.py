"""What an experiment tracker costs training.

Trains copies of a run in turns, one with and one without the tracker, and prints the ratio of
their seconds per step, without the first two. The tracker's extra must be installed:
`uv run --extra tensorboard benchmarks/looking/tracker_cost.py runs/layers`.
"""

from rungs.common.command import run_command

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from benchmarks.report import spread
from rungs.run import metrics

_ENVIRONMENT = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


@click.command()
@click.argument("run")
@click.option("--tracker", default="tensorboard", show_default=True)
@click.option("--turns", default=3, show_default=True)
@click.option("--set", "settings", multiple=True, help="Keys of both copies.")
def main(run: str, tracker: str, turns: int, settings: tuple[str, ...]) -> None:
    """Print the cost of a tracker for RUN."""
    ratios, shares = [], []
    for _ in range(turns):
        with tempfile.TemporaryDirectory() as name:
            plain = train(Path(name) / "plain", run, settings)
            tracked = train(Path(name) / "tracked", run, (*settings, f'trackers=["{tracker}"]'))
        ratios.append(statistics.median(tracked) / statistics.median(plain))
        shares.append(sum(tracked) / sum(plain))
    click.echo(f"{tracker}: a step takes {spread(ratios, 3)} times as long (medians),")
    click.echo(f"all steps {spread(shares, 3)} times")


def train(folder: Path, like: str, settings: tuple[str, ...]) -> list[float]:
    """Return the seconds of each step but the first ones."""
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "train.py", str(folder), "--like", like, "--quiet", *options]
    subprocess.run(command, check=True, env=os.environ | _ENVIRONMENT)
    steps = metrics.read(folder / metrics.METRICS_FILE)
    return [step.step_seconds for step in steps[2:]]


if __name__ == "__main__":
    run_command(main)

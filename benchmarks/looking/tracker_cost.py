"""The processor time that experiment trackers take beside training.

Sends runs of few and of many steps to each tracker that is installed, by the program that training
starts, and prints the seconds of a core that it takes to start, and per step. Training loses at
most that, as the program has the lowest priority. For all of them:
`uv run --extra wandb --extra tensorboard --extra trackio --extra mlflow
benchmarks/looking/tracker_cost.py`.
"""

from rungs.common.command import run_command

import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import click

from benchmarks.checkpoints_and_data.chart_cost import write_run
from benchmarks.report import spread
from rungs.integrations.trackers import BUILT_IN

_FEW = 100


@click.command()
@click.option("--steps", default=10_000, show_default=True)
@click.option("--turns", default=3, show_default=True)
def main(steps: int, turns: int) -> None:
    """Print the processor time of each installed tracker."""
    for tracker, (library, _) in BUILT_IN.items():
        if importlib.util.find_spec(library) is None:
            click.echo(f"{tracker}: not installed")
            continue
        few = [seconds_to_send(tracker, _FEW) for _ in range(turns)]
        many = [seconds_to_send(tracker, steps) for _ in range(turns)]
        each = [1000 * (b - a) / (steps - _FEW) for a, b in zip(few, many, strict=True)]
        click.echo(f"{tracker}: {spread(few)} s to start and end, {spread(each, 3)} ms per step")


def seconds_to_send(tracker: str, steps: int) -> float:
    """Return the seconds of a core that sending a run takes, with the processes of the library."""
    with tempfile.TemporaryDirectory() as name:
        run, stores = Path(name) / "run", Path(name) / "stores"
        run.mkdir()
        stores.mkdir()
        write_run(run, steps)
        local = {
            "WANDB_MODE": "offline",
            "WANDB_DIR": str(stores),
            "WANDB_SILENT": "true",
            "TRACKIO_DIR": str(stores),
            "MLFLOW_TRACKING_URI": f"sqlite:///{stores / 'mlflow.db'}",
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        }
        before = os.times()
        subprocess.run(
            [sys.executable, "-m", "rungs.integrations.tracking_feed", str(run), tracker],
            input="new\n\n",
            text=True,
            check=True,
            stdout=subprocess.DEVNULL,
            cwd=stores,
            env=os.environ | local,
        )
        after = os.times()
    children = "children_user", "children_system"
    return sum(getattr(after, name) - getattr(before, name) for name in children)


if __name__ == "__main__":
    run_command(main)

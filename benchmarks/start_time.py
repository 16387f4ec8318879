"""Seconds from process start to the first step finished: `uv run benchmarks/start_time.py RUN`.

Starts a copy of the run again and again, each time until its first line of metrics stands, with
the code compiled by a start before that is not counted.
"""

import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

from rungs.common.errors import run_command
from rungs.run.folder import find_run

TRAIN = Path(__file__).parents[1] / "train.py"


@click.command()
@click.argument("run", default="runs/a-to-a")
@click.option("--starts", default=7, show_default=True, type=click.IntRange(1))
def main(run: str, starts: int) -> None:
    """Median and spread over several starts of RUN."""
    seconds = [time_to_first_step(find_run(run)) for _ in range(starts + 1)][1:]
    median, low, high = statistics.median(seconds), min(seconds), max(seconds)
    click.echo(f"{run}: {median:.2f} s median of {starts} starts, {low:.2f} to {high:.2f} s")


def time_to_first_step(run: Path) -> float:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / run.name
        copy.mkdir()
        for name in ("model.json", "train.json"):
            shutil.copy(run / name, copy / name)
        metrics = copy / "metrics.jsonl"
        begin = time.perf_counter()
        process = subprocess.Popen(
            ["uv", "run", str(TRAIN), str(copy)], stderr=subprocess.PIPE, start_new_session=True
        )
        while not (metrics.exists() and metrics.stat().st_size):
            if process.poll() is not None:
                _, errors = process.communicate()
                sys.exit(errors.decode())
            time.sleep(0.005)
        seconds = time.perf_counter() - begin
        process.terminate()
        process.communicate()
    return seconds


if __name__ == "__main__":
    run_command(main)

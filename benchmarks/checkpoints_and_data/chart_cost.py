"""What drawing the charts of a long run costs.

Writes the metrics of a run of many steps, with noise, validations and spikes, runs charts.py on it,
and prints its time and its peak memory. Linux only.
"""

from rungs.common.command import run_command

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from rungs.run.metrics import METRICS_FILE, StepMetrics

CONFIGS = {
    "model.json": {"vocab_size": 32, "context_length": 8, "emb_dim": 16, "n_layers": 0},
    "train.json": {
        "dataset": "none",
        "microbatch_size": 4,
        "learning_rate": 0.01,
        "checkpoint_interval": 1000,
    },
}


@click.command()
@click.option("--steps", default=600_000, show_default=True)
def main(steps: int) -> None:
    """Print the seconds and megabytes that charts.py takes."""
    with tempfile.TemporaryDirectory() as folder:
        write_run(Path(folder), steps)
        seconds, megabytes = draw(folder)
    click.echo(f"{steps:,} steps: {seconds:.1f} s, {megabytes:,.0f} MB at the peak")


def write_run(folder: Path, steps: int, seed: int = 0) -> None:
    """Write a run folder with noise, validations and spikes."""
    for name, config in CONFIGS.items():
        (folder / name).write_text(json.dumps(config))
    noise = np.random.default_rng(seed).lognormal(sigma=0.3, size=steps)
    with (folder / METRICS_FILE).open("w") as file:
        file.writelines(step(number, noise[number]).as_line() for number in range(steps))


def step(number: int, noise: float) -> StepMetrics:
    loss = (2 + 8 / (1 + number / 500) ** 0.5) * float(noise)
    return StepMetrics(
        global_step=number,
        tokens_seen=32 * (number + 1),
        train_loss=loss,
        learning_rate=0.01,
        gradient_norm=float(noise),
        clipped=bool(noise > 1),
        dropped_microbatches=0,
        step_seconds=float(noise),
        tokens_per_second=32 / float(noise),
        validation_loss=loss if number % 1000 == 0 else None,
        spike="seen" if noise > 3 else None,
    )


def draw(folder: str) -> tuple[float, float]:
    """Return the seconds and the peak megabytes of charts.py."""
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, "charts.py", folder], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise click.ClickException("charts.py failed")
    return time.perf_counter() - begin, usage.ru_maxrss / 1024


if __name__ == "__main__":
    run_command(main)

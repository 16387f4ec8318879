"""What checkpoints, validation, charts, samples and a tracker together cost a run.

Trains a small run with many checkpoints, each with a validation, charts, the texts of two prompts
and, if its library is installed, TensorBoard. The steps in the seconds after a checkpoint, in which
all of that happens, are compared with the other steps until the next one: the seconds that a
checkpoint costs are then a share of the time between two. The first two checkpoints, which also
compile, and what follows them are not counted; nor is the end of the run, if it has a checkpoint
whose rest comes too late. Charts are drawn at most every 30 s.
"""

from rungs.common.command import run_command

import json
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import click

from benchmarks.report import spread
from rungs.common.machine import processor
from rungs.data.catalog import find_datasets_dir
from rungs.run import metrics
from rungs.run.metrics import StepMetrics

MODEL = {"vocab_size": 4096, "context_length": 256, "emb_dim": 256, "n_layers": 4, "n_heads": 4}
TRAIN: dict[str, Any] = {
    "dataset": "python-stdlib",
    "microbatch_size": 8,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.001,
    "clipping_max_norm": 1.0,
    "sample_prompts": ["def main():", "class "],
}
TOKENS_PER_STEP = 2 * 8 * 256
AFTER = 10.0
"""Seconds after a checkpoint in which its charts and samples are made."""
EPOCH_STEPS = 40
ROOT = Path(__file__).parents[2]


@click.command()
@click.option("--minutes", default=5, show_default=True, type=click.IntRange(2))
@click.option(
    "--seconds-between-checkpoints",
    "interval",
    default=4 * AFTER,
    show_default=True,
    type=click.FloatRange(1.5 * AFTER),
)
@click.option("--validation-tokens", default=16_384, show_default=True)
def main(minutes: int, interval: float, validation_tokens: int) -> None:
    """Print the share of the time that is lost to everything but training steps."""
    given = {**TRAIN, "validation_tokens": validation_tokens}
    if find_spec("tensorboard"):
        given["trackers"] = ["tensorboard"]
    with tempfile.TemporaryDirectory() as folder:
        pilot = steps_of(Path(folder) / "pilot", given, 1, EPOCH_STEPS)
        each = statistics.median(step.step_seconds for step in pilot)
        every = round(interval / each)
        epochs = round((minutes * 60 + 2 * interval) / each / EPOCH_STEPS)
        click.echo(processor())
        click.echo(f"a step takes {1000 * each:.0f} ms; a checkpoint every {every} steps")
        steps = steps_of(Path(folder) / "run", given, epochs, every)
    for line in report(steps, every):
        click.echo(line)


def steps_of(folder: Path, given: dict[str, Any], epochs: int, every: int) -> list[StepMetrics]:
    """Train a run of so many epochs, and return its steps' metrics."""
    folder.mkdir()
    tokens = EPOCH_STEPS * TOKENS_PER_STEP
    train = {**given, "checkpoint_interval": every, "min_train_tokens": tokens, "epochs": epochs}
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "train.json").write_text(json.dumps(train))
    command = [sys.executable, "train.py", str(folder), "--datasets-dir", str(find_datasets_dir())]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise click.ClickException(ended.stderr)
    return metrics.read(folder / "metrics.jsonl")


def report(steps: list[StepMetrics], every: int) -> list[str]:
    """Return lines with the cost of the checkpoints that `windows` counts."""
    after_checkpoint = windows(steps, every)
    busy = [seconds for window in after_checkpoint for seconds in window.busy]
    quiet = [seconds for window in after_checkpoint for seconds in window.quiet]
    each = statistics.fmean(quiet)
    lost = [window.lost for window in after_checkpoint]
    mean = statistics.fmean(lost)
    return [
        f"{len(lost)} checkpoints in {sum(busy) + sum(quiet):.0f} s; a step: {1000 * each:.1f} ms,"
        f" {1000 * statistics.fmean(busy):.1f} ms in the {AFTER:.0f} s after a checkpoint",
        f"a checkpoint costs {spread(lost)} s, on average {mean:.2f} s",
        f"at one a minute: {statistics.median(lost) / 60:.2%}, on average {mean / 60:.2%} of it",
    ]


class Window(NamedTuple):
    """Seconds of the steps from one checkpoint to the next."""

    busy: list[float]
    """Those until `AFTER` seconds have passed."""
    quiet: list[float]

    @property
    def lost(self) -> float:
        """Seconds that the busy steps took longer than as many quiet ones."""
        return sum(self.busy) - len(self.busy) * statistics.fmean(self.quiet)


def windows(steps: list[StepMetrics], every: int) -> list[Window]:
    """Return the steps after each checkpoint but the first two, if there is another one later."""
    found = []
    last = steps[-1].global_step
    for first in range(2 * every, last - every + 1, every):
        window, since = Window([], []), 0.0
        for step in steps[first : first + every]:
            (window.busy if since < AFTER else window.quiet).append(step.step_seconds)
            since += step.step_seconds
        found.append(window)
    return found


if __name__ == "__main__":
    run_command(main)

"""What checkpoints cost the steps around them: `uv run benchmarks/checkpoint_stall.py`

Trains one small run again and again, by turns without checkpoints, with them, and with them but no
charts, each time in a process of its own (`timed_train.py`). The time of validation is taken off.
The first checkpoint, which all have, and the steps up to the second are not counted.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from rungs.common.errors import run_command
from rungs.data.catalog import find_datasets_dir
from rungs.run import metrics

TIMED_TRAIN = Path(__file__).with_name("timed_train.py")
INTERVAL = 20
MODEL = {"vocab_size": 4096, "context_length": 256, "emb_dim": 256, "n_layers": 4, "n_heads": 4}
TRAIN = {
    "dataset": "python-stdlib",
    "microbatch_size": 4,
    "gradient_accumulation_steps": 5,
    "learning_rate": 0.001,
    "clipping_max_norm": 1.0,
    "validation_tokens": 256,
}
TOKENS_PER_STEP = 5 * 4 * 256
VALIDATION, SAVE, BEHIND = (
    "trainer.Trainer._validate",
    "saver.Saver.save",
    "saver.Saver._finish",
)
IN_THE_LOOP = ("trainer.Trainer._meta", SAVE)
"""All that a checkpoint has the loop wait for."""
Calls = dict[str, float]
"""Seconds in each function that is timed."""


class Variant(NamedTuple):
    name: str
    has_checkpoints: bool
    charts: str


SIDES = (
    Variant("without", False, "charts"),
    Variant("with", True, "charts"),
    Variant("with, no charts", True, "no-charts"),
)


class MeasuredRun(NamedTuple):
    """One run of a side."""

    step_seconds: list[float]
    """Of each step that counts, validation taken off."""
    checkpoints: list[Calls]
    """What the loop did for each that counts."""
    first_checkpoint: Calls
    behind_seconds: list[float]
    """What each then took behind the loop."""
    checkpoint_bytes: int

    @property
    def longest_gap_seconds(self) -> float:
        """Of the longest step beyond the median."""
        return max(self.step_seconds) - statistics.median(self.step_seconds)


@click.command()
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@click.option("--checkpoints", default=2, show_default=True, type=click.IntRange(1), help="Each.")
def main(turns: int, checkpoints: int) -> None:
    """Print throughput with and without checkpoints, and where the loop stands still."""
    found: dict[str, list[MeasuredRun]] = {side.name: [] for side in SIDES}
    for _, side in itertools.product(range(turns), SIDES):
        with tempfile.TemporaryDirectory() as folder:
            found[side.name].append(trained(Path(folder), side, checkpoints))
    print_throughput(found)
    print_stall(found["with"])


def trained(folder: Path, side: Variant, checkpoints: int) -> MeasuredRun:
    """A run of a side; its steps that count begin after the second checkpoint, and end with the
    one that has the last."""
    interval = INTERVAL if side.has_checkpoints else 1_000_000
    steps = 1 + (checkpoints + 1) * INTERVAL
    run, calls = folder / "run", folder / "calls.jsonl"
    run.mkdir()
    tokens = {"checkpoint_interval": interval, "min_train_tokens": steps * TOKENS_PER_STEP}
    (run / "model.json").write_text(json.dumps(MODEL))
    (run / "train.json").write_text(json.dumps(TRAIN | tokens))
    datasets = ["--datasets-dir", str(find_datasets_dir())]
    command = [sys.executable, str(TIMED_TRAIN), str(calls), side.charts, str(run), *datasets]
    process = subprocess.run(command, stderr=subprocess.PIPE, text=True)
    if process.returncode:
        sys.exit(process.stderr)
    seconds = [step.step_seconds for step in metrics.read(run / "metrics.jsonl")]
    before, behind = calls_in(calls.read_text().splitlines())
    if side.has_checkpoints:
        for number, checkpoint in enumerate(before[:-1]):
            seconds[number * INTERVAL + 1] -= checkpoint[VALIDATION]
    latest = run / "checkpoints" / "latest"
    return MeasuredRun(
        seconds[INTERVAL + 1 :],
        before[1:-1],
        before[0],
        behind[1:-1],
        sum(path.stat().st_size for path in latest.resolve().rglob("*") if path.is_file()),
    )


def calls_in(lines: Iterable[str]) -> tuple[list[Calls], list[float]]:
    """For each checkpoint the time in each function up to the end of its `save`; and the seconds
    of each behind the loop."""
    checkpoints: list[Calls] = []
    behind = []
    calls: Calls = defaultdict(float)
    for name, seconds in map(json.loads, lines):
        if name == BEHIND:
            behind.append(seconds)
            continue
        calls[name] += seconds
        if name == SAVE:
            checkpoints.append(calls)
            calls = defaultdict(float)
    return checkpoints, behind


def print_throughput(found: dict[str, list[MeasuredRun]]) -> None:
    """A line for each side, beside that without checkpoints in the same turn."""
    click.echo(f"{'checkpoints':18} {'tokens/s':>26} {'to without':>24} {'longest gap, ms':>24}")
    rates = {name: [rate(run) for run in runs] for name, runs in found.items()}
    for name, runs in found.items():
        ratios = [one / other for one, other in zip(rates[name], rates["without"], strict=True)]
        gaps = [1000 * run.longest_gap_seconds for run in runs]
        click.echo(
            f"{name:18} {spread(rates[name], 0):>26} {spread(ratios, 3):>24} {spread(gaps, 0):>24}"
        )
    click.echo("")


def rate(run: MeasuredRun) -> float:
    """Tokens per second."""
    return TOKENS_PER_STEP * len(run.step_seconds) / sum(run.step_seconds)


def print_stall(runs: list[MeasuredRun]) -> None:
    """How long the loop waits at a checkpoint, and for what."""
    checkpoints = [checkpoint for run in runs for checkpoint in run.checkpoints]
    size = runs[0].checkpoint_bytes
    click.echo(f"milliseconds that the loop stands still at a checkpoint: {ms(waits(checkpoints))}")
    for name in checkpoints[0]:
        if name != VALIDATION:
            indent = "  " if name in IN_THE_LOOP else "    of which "
            click.echo(f"{indent}{name}: {ms([calls[name] for calls in checkpoints])}")
    firsts = waits([run.first_checkpoint for run in runs])
    click.echo(f"at the first, with what a process does only once: {ms(firsts)}")
    click.echo(f"a checkpoint is {size / 1e6:.1f} MB; so much copied: {ms(copies(size))}")
    click.echo(f"then, behind the loop: {ms([s for run in runs for s in run.behind_seconds])}")


def waits(checkpoints: list[Calls]) -> list[float]:
    """Seconds that the loop waits for each, validation left out."""
    return [sum(calls[name] for name in IN_THE_LOOP) for calls in checkpoints]


def copies(size: int) -> list[float]:
    """Seconds to copy so many bytes into new memory."""
    held = np.ones(size, np.uint8)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        held.copy()
        seconds.append(time.perf_counter() - begin)
    return seconds


def ms(seconds: list[float]) -> str:
    return spread([1000 * value for value in seconds], 1)


def spread(values: list[float], digits: int) -> str:
    middle = f"{statistics.median(values):,.{digits}f}"
    return f"{middle} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


if __name__ == "__main__":
    run_command(main)

"""How long checkpoints make training wait.

Trains one small run again and again, in turns without checkpoints, with them, and with them but
without charts, each time in a process of its own that times the functions a checkpoint goes
through. The time of validation is subtracted. The first checkpoint, which all runs have, and the
steps up to the second are not counted.
"""

from rungs.common.command import run_command

import functools
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import click
import numpy as np

from benchmarks.report import spread
from rungs.checkpointing import saver
from rungs.checkpointing.saver import Saver
from rungs.cli import train
from rungs.common.shown_text import align_columns
from rungs.data.catalog import find_datasets_dir
from rungs.run import metrics
from rungs.training import trainer
from rungs.training.background import ChartProcess
from rungs.training.dataset_learner import DatasetLearner

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
TIMED: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (DatasetLearner, DatasetLearner.validate),
    (trainer, trainer.describe_checkpoint),
    (Saver, Saver.save),
    (Saver, Saver.wait),
    (saver, saver.host_copies),
    (Saver, Saver._finish),
)
"""Functions and where to replace them. Training waits for `describe_checkpoint` and `save`; `wait`
and `host_copies` are parts of `save`; `_finish` runs in a thread."""
VALIDATE, META, SAVE, WAIT, COPY, FINISH = (function.__qualname__ for _, function in TIMED)
SIDES = WITHOUT, WITH, WITHOUT_CHARTS = "without", "with", "with, no charts"
Calls = dict[str, float]
"""Seconds in each timed function."""


class MeasuredRun(NamedTuple):
    """One training of a side."""

    step_seconds: list[float]
    """Of each step that counts, validation subtracted."""
    checkpoints: list[Calls]
    """Of each checkpoint that counts."""
    first_checkpoint: Calls
    background_seconds: list[float]
    """Of each checkpoint that counts, in its thread."""
    checkpoint_bytes: int

    @property
    def tokens_per_second(self) -> float:
        return TOKENS_PER_STEP * len(self.step_seconds) / sum(self.step_seconds)

    @property
    def longest_gap_seconds(self) -> float:
        """The longest step's time beyond the median."""
        return max(self.step_seconds) - statistics.median(self.step_seconds)


@click.command()
@click.option("--turns", default=5, show_default=True, type=click.IntRange(1))
@click.option("--checkpoints", default=2, show_default=True, type=click.IntRange(1), help="Each.")
def main(turns: int, checkpoints: int) -> None:
    """Print throughput with and without checkpoints, and what training waits for."""
    runs: dict[str, list[MeasuredRun]] = {side: [] for side in SIDES}
    for _, side in itertools.product(range(turns), SIDES):
        with tempfile.TemporaryDirectory() as folder:
            runs[side].append(train_side(Path(folder), side, checkpoints))
    print_throughput(runs)
    print_stall(runs[WITH])


def train_side(folder: Path, side: str, checkpoints: int) -> MeasuredRun:
    """Train a run in a process of its own. The steps that count begin after the second checkpoint
    and end with the step of the last one."""
    interval = 1_000_000 if side == WITHOUT else INTERVAL
    steps = 1 + (checkpoints + 1) * INTERVAL
    run, calls = folder / "run", folder / "calls.jsonl"
    run.mkdir()
    tokens = {"checkpoint_interval": interval, "min_train_tokens": steps * TOKENS_PER_STEP}
    (run / "model.json").write_text(json.dumps(MODEL))
    (run / "train.json").write_text(json.dumps(TRAIN | tokens))
    datasets = ["--datasets-dir", str(find_datasets_dir())]
    process = subprocess.run(
        [sys.executable, __file__, side, str(calls), str(run), *datasets],
        stderr=subprocess.PIPE,
        text=True,
    )
    if process.returncode:
        sys.exit(process.stderr)
    seconds = [step.step_seconds for step in metrics.read(run / "metrics.jsonl")]
    before, background = read_calls(calls)
    if side != WITHOUT:
        for number, checkpoint in enumerate(before[:-1]):
            seconds[number * INTERVAL + 1] -= checkpoint[VALIDATE]
    latest = run / "checkpoints" / "latest"
    return MeasuredRun(
        seconds[INTERVAL + 1 :],
        before[1:-1],
        before[0],
        background[1:-1],
        sum(path.stat().st_size for path in latest.resolve().rglob("*") if path.is_file()),
    )


def train_with_clocks(side: str, calls: Path, *arguments: str) -> None:
    """Be `train.py`, and write a line of JSON for each call of a timed function."""
    sys.argv = ["train.py", *arguments]
    if side == WITHOUT_CHARTS:
        drawer: Any = ChartProcess
        drawer.request = lambda _: None
    with calls.open("w", buffering=1) as file:
        for owner, function in TIMED:
            setattr(owner, function.__name__, timed(function, file))
        run_command(train.main)


def timed(function: Callable[..., Any], file: TextIO) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            file.write(json.dumps([function.__qualname__, time.perf_counter() - begin]) + "\n")

    return call


def read_calls(path: Path) -> tuple[list[Calls], list[float]]:
    """Return the time in each function for each checkpoint, up to the end of its `save`; and the
    seconds that each took in the background."""
    checkpoints: list[Calls] = []
    background = []
    calls: Calls = defaultdict(float)
    for name, seconds in map(json.loads, path.read_text().splitlines()):
        if name == FINISH:
            background.append(seconds)
            continue
        calls[name] += seconds
        if name == SAVE:
            checkpoints.append(calls)
            calls = defaultdict(float)
    return checkpoints, background


def print_throughput(runs: dict[str, list[MeasuredRun]]) -> None:
    """Print a line for each side, compared with the one without checkpoints in the same turn."""
    rates = {side: [run.tokens_per_second for run in of_side] for side, of_side in runs.items()}
    rows = [
        (
            side,
            spread(rates[side], 0),
            spread([one / other for one, other in zip(rates[side], rates[WITHOUT], strict=True)]),
            milliseconds([run.longest_gap_seconds for run in of_side]),
        )
        for side, of_side in runs.items()
    ]
    heading = ("checkpoints", "tokens/s", "to without", "longest gap, ms")
    click.echo(f"{align_columns([heading, *rows])}\n")


def print_stall(runs: list[MeasuredRun]) -> None:
    """Print how long training waits at a checkpoint, and for what."""
    checkpoints = [checkpoint for run in runs for checkpoint in run.checkpoints]
    size = runs[0].checkpoint_bytes
    parts = {META: META, SAVE: SAVE, WAIT: f"  of which {WAIT}", COPY: f"  of which {COPY}"}
    rows = [
        ("training waits at a checkpoint", milliseconds(waits(checkpoints))),
        *((text, milliseconds([c[name] for c in checkpoints])) for name, text in parts.items()),
        ("at a process's first", milliseconds(waits([run.first_checkpoint for run in runs]))),
        (f"to copy {size / 1e6:.1f} MB, as a checkpoint has", milliseconds(copy_seconds(size))),
        ("in the background", milliseconds([s for run in runs for s in run.background_seconds])),
    ]
    click.echo(align_columns([("", "ms"), *rows]))


def waits(checkpoints: list[Calls]) -> list[float]:
    """Return the seconds that training waits for each checkpoint, without validation."""
    return [calls[META] + calls[SAVE] for calls in checkpoints]


def copy_seconds(size: int) -> list[float]:
    """Return the seconds that it takes to copy so many bytes into new memory."""
    held = np.ones(size, np.uint8)
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        held.copy()
        seconds.append(time.perf_counter() - begin)
    return seconds


def milliseconds(seconds: list[float]) -> str:
    return spread([1000 * value for value in seconds], 1)


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] in SIDES:
        side, calls, *arguments = sys.argv[1:]
        train_with_clocks(side, Path(calls), *arguments)
    else:
        run_command(main)

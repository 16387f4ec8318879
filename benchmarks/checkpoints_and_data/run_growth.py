"""How the cost of a step and of a checkpoint grows with the run: with the size of its dataset, and
with the number of checkpoints that it keeps.

A step reads its sequences from a token file, shuffled; after a checkpoint is written, all of the
run's are listed to find the best and the newest, and those that are to be deleted. Files of tokens
are in the system's file cache if they fit.
"""

from rungs.common.command import run_command

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import click
import numpy as np

from benchmarks.checkpoints_and_data.data_memory import write_dataset
from benchmarks.report import spread
from rungs.checkpointing import checkpoint_folder
from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.common.shown_text import align_columns
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.catalog import find_datasets_dir
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData

ROOT = Path(__file__).parents[2]
STEPS = 50
"""Read in each turn."""
TRAIN = TrainConfig(
    dataset="tokens",
    microbatch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=1.0,
    checkpoint_interval=1,
    shuffle=True,
)
MODEL = {"vocab_size": 4096, "context_length": 256, "emb_dim": 8, "n_layers": 0}


@click.command()
@click.option("--megabytes", multiple=True, default=(2, 20, 200, 2000), show_default=True)
@click.option("--checkpoints", multiple=True, default=(1, 10, 100, 1000), show_default=True)
@click.option("--turns", default=7, show_default=True, type=click.IntRange(1))
def main(megabytes: tuple[int, ...], checkpoints: tuple[int, ...], turns: int) -> None:
    """Print milliseconds by the size of the dataset and by the number of checkpoints."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        readers = {f"{size:,} MB": reader(folder / f"{size}", size) for size in megabytes}
        print_table("dataset", "reading a step's batch, ms", readers, turns)
        saved = train_checkpoint(folder / "run")
        keepers = {
            f"{count:,}": keeper(folder / f"of-{count}", saved, count) for count in checkpoints
        }
        print_table("checkpoints", "finding the best, newest and superfluous, ms", keepers, turns)


def reader(folder: Path, megabytes: int) -> Callable[[], float]:
    """Return a function that reads batches of a dataset and returns the seconds of each."""
    write_dataset(folder, megabytes)
    model = ModelConfig(vocab_size=50_257, context_length=256, emb_dim=1, n_layers=0)
    data = TrainingData(RunConfig(model, TRAIN), {"tokens": Dataset("tokens", folder)})
    rng = np.random.default_rng(0)

    def read() -> float:
        begin = time.perf_counter()
        for step in rng.integers(data.total_steps, size=STEPS):
            data.batch(int(step))
        return (time.perf_counter() - begin) / STEPS

    return read


def train_checkpoint(folder: Path) -> Path:
    """Return the checkpoint of a run of one step."""
    folder.mkdir()
    train = TRAIN.as_json() | {"dataset": "python-stdlib", "min_train_tokens": 1}
    (folder / "model.json").write_text(json.dumps(MODEL))
    (folder / "train.json").write_text(json.dumps(train))
    command = [sys.executable, "train.py", str(folder), "--datasets-dir", str(find_datasets_dir())]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return list_checkpoints(folder / "checkpoints")[-1].folder


def keeper(folder: Path, saved: Path, count: int) -> Callable[[], float]:
    """Return a function that does what follows the writing of a checkpoint, in a folder of copies
    of one, and returns the seconds."""
    for number in range(count):
        shutil.copytree(saved, folder / f"{number:06d}-{saved.name}", copy_function=os.link)

    def update() -> float:
        begin = time.perf_counter()
        checkpoint_folder.update_links(folder)
        checkpoint_folder.delete_old(folder, -1)
        return time.perf_counter() - begin

    return update


def print_table(
    what: str, measured: str, sides: dict[str, Callable[[], float]], turns: int
) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(turns):
        for name, measure in sides.items():
            seconds[name].append(measure())
    rows = [(name, spread([1000 * one for one in each], 3)) for name, each in seconds.items()]
    click.echo(align_columns([(what, measured), *rows]) + "\n")


if __name__ == "__main__":
    run_command(main)

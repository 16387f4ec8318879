"""Whether reading a dataset takes more memory the larger it is.

Reads every training batch of a small and of a large token file, each in a process of its own, and
compares their anonymous memory (RssAnon) at the end. Linux only.
"""

from rungs.common.command import run_command

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click
import numpy as np

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.data.tokens import token_file
from rungs.data.tokens.dataset import Dataset
from rungs.data.tokens.loader import TrainingData

BLOCK_TOKENS = 1 << 20


@click.command()
@click.option("--megabytes", type=(int, int), default=(2, 2000), show_default=True)
@click.option("--read", type=click.Path(path_type=Path), hidden=True)
def main(megabytes: tuple[int, int], read: Path | None) -> None:
    """Print RssAnon after a pass over token files of two sizes."""
    if read is not None:
        click.echo(read_all(read))
        return
    with tempfile.TemporaryDirectory() as folder:
        small, large = (measure(Path(folder) / f"{size}-mb", size) for size in megabytes)
    click.echo(f"difference: {large - small:.1f} MB")


def measure(folder: Path, megabytes: int) -> float:
    write_dataset(folder, megabytes)
    begin = time.perf_counter()
    command = [sys.executable, __file__, "--read", str(folder)]
    memory = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    seconds = time.perf_counter() - begin
    click.echo(f"{megabytes:,} MB of tokens: RssAnon {memory:.1f} MB after {seconds:.1f} s")
    return memory


def write_dataset(folder: Path, megabytes: int) -> None:
    folder.mkdir()
    block = np.random.default_rng(0).integers(0, 50_257, BLOCK_TOKENS, np.uint16)
    with token_file.TokenWriter(folder / "train.safetensors", "U16") as writer:
        for _ in range(max(megabytes * 500_000 // BLOCK_TOKENS, 1)):
            writer.append(block)


def read_all(folder: Path) -> float:
    """Return the megabytes of anonymous memory after reading every batch."""
    train = TrainConfig(
        dataset="tokens",
        microbatch_size=8,
        gradient_accumulation_steps=4,
        learning_rate=1.0,
        checkpoint_interval=1,
    )
    model = ModelConfig(vocab_size=50_257, context_length=1024, emb_dim=1, n_layers=0)
    for _ in TrainingData(RunConfig(model, train), {"tokens": Dataset("tokens", folder)}).batches():
        pass
    status = Path("/proc/self/status").read_text()
    return int(re.findall(r"RssAnon:\s+(\d+)", status)[0]) / 1024


if __name__ == "__main__":
    run_command(main)

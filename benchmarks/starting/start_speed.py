"""How long commands take to start: the help of each, the first step of a run, the first token.

The help is complete when the command ends. The first step is the one of a copy of RUN, from the
start of the process until its results are read. The first token is one of a model of 20 million
random parameters. All run once before they are measured, so that bytecode and compiled code are
cached, then in turns. Prints the median seconds and the seconds of processor time, each with the
lowest and the highest.
"""

from rungs.common.command import run_command

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import click

from benchmarks.report import spread
from benchmarks.side_process import failure
from rungs.checkpointing.weights_file import WeightsHeader, write_weights
from rungs.common.machine import processor
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import MODEL_FILE, TRAIN_FILE
from rungs.data.build.text_dataset import PYTHON_STDLIB as NAME
from rungs.data.catalog import find_datasets_dir, open_dataset
from rungs.data.text.tokenizer import TOKENIZER_FILE
from rungs.parallel.jax_setup import CACHE_VARIABLE
from rungs.step.state import build_model, named_arrays

ROOT = Path(__file__).parents[2]
MODEL = {
    "vocab_size": 4096,
    "context_length": 256,
    "emb_dim": 512,
    "n_layers": 5,
    "n_heads": 8,
    "positions": "rope",
    "norm": "rms_norm",
}
_ONE_FILE = 10**9


class Start(NamedTuple):
    """One measurement, in seconds."""

    wall: float
    """Until the line that was waited for."""
    processor: float
    """Of all threads, until the process has ended."""


class Case(NamedTuple):
    """What is started."""

    name: str
    command: Sequence[str]
    is_ready_at_first_line: bool
    """Else when the process ends."""


@click.command()
@click.option("--turns", default=5, show_default=True)
@click.option("--run", default=str(ROOT / "runs/layers"), help="The run to copy.")
def main(turns: int, run: str) -> None:
    """Print how long each start takes."""
    dataset = open_dataset(NAME, find_datasets_dir())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run").mkdir()
        for file in (MODEL_FILE, TRAIN_FILE):
            shutil.copy(Path(run) / file, folder / "run")
        assert dataset.tokenizer_file is not None
        weights = write_model(folder, dataset.tokenizer_file)
        started = first_step(folder / "run", find_datasets_dir())
        cases = [*helps(), started, first_token(weights)]
        environment = {**os.environ, CACHE_VARIABLE: str(folder / "compiled")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        rounds = [[measure(case, environment) for case in cases] for _ in range(turns + 1)]
    click.echo(processor())
    for case, starts in zip(cases, zip(*rounds[1:], strict=True), strict=True):
        walls, cpu_times = zip(*starts, strict=True)
        click.echo(f"{case.name:28} {spread(walls):24} {spread(cpu_times)}")


def helps() -> list[Case]:
    """Return the help of each command and subcommand."""
    cases = []
    for path in sorted({*ROOT.glob("*.py")} - {ROOT / "install_uv.py", ROOT / "config.py"}):
        command = importlib.import_module(f"rungs.cli.{path.stem}").main
        inner = command.commands if isinstance(command, click.Group) else ()
        for words in ([], *([name] for name in inner)):
            line = [str(path), *words, "--help"]
            cases.append(Case(" ".join([path.name, *words, "--help"]), line, False))
    return cases


def first_step(run: Path, datasets: Path) -> Case:
    """Return the start of a run from random weights."""
    script = str(Path(__file__).with_name("first_step.py"))
    options = ["--fresh", "--datasets-dir", str(datasets)]
    return Case("train.py: first step", [script, str(run), *options], True)


def first_token(weights: Path) -> Case:
    """Return the generation of a token."""
    line = [str(ROOT / "generate.py"), str(weights), "def main():", "--new-tokens", "1"]
    return Case("generate.py: first token", line, True)


def write_model(folder: Path, tokenizer: Path) -> Path:
    """Write a model with random weights and its tokenizer; return its `model.safetensors`."""
    import jax

    config = ModelConfig.model_validate(MODEL)
    arrays = jax.device_get(named_arrays(build_model(config, None, jax.random.key(0))))
    write_weights(folder, arrays, WeightsHeader(config, None, NAME), _ONE_FILE)
    shutil.copy(tokenizer, folder / TOKENIZER_FILE)
    return folder / "model.safetensors"


def measure(case: Case, environment: dict[str, str]) -> Start:
    """Start a process and wait for its end.

    Raises:
        ClickException: it failed.
    """
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    begin = time.perf_counter()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [sys.executable, *case.command],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        assert process.stdout is not None
        if case.is_ready_at_first_line:
            process.stdout.readline()
            wall = time.perf_counter() - begin
        process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        if status:
            errors.seek(0)
            raise click.ClickException(failure(case.name, errors.read()))
    if not case.is_ready_at_first_line:
        wall = time.perf_counter() - begin
    return Start(wall, used.ru_utime + used.ru_stime)


if __name__ == "__main__":
    run_command(main)

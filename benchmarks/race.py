"""The same text, device and minutes: how far do GPT-2 in PyTorch, in Rungs, and a recipe get?

Each side trains with each seed on the tokens of the same dataset, one after another, and is
validated on the same tokens. The minutes have validations in them, but no compilation: PyTorch's
begin after it, and a run of Rungs has compiled before, as its shorter copy; starting, reading what
was compiled and checkpoints are part of its minutes. A side may have minutes of its own, as in
`rungs-recipe:2`.
Killed and run again, the command goes on with what is missing.
"""

from rungs.common.command import run_command

import functools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import jax
import numpy as np

from benchmarks.racing.chart import race_chart
from benchmarks.racing.results import Curve, Result
from benchmarks.racing.sides import NAMES, PYTORCH, SIZES, VALIDATIONS, Entry, Size, configs
from benchmarks.side_process import failure
from benchmarks.training_speed.train_speed import torch_command
from rungs.common.machine import core_count, processor
from rungs.common.shown_text import align_columns
from rungs.data.catalog import open_dataset
from rungs.data.tokens.dataset import TRAIN, VALIDATION
from rungs.optim.precision import fastest_dtype
from rungs.report import drawing
from rungs.run import metrics

ROOT, NAME = Path(__file__).parents[1], "race"
FOLDER = Path(__file__).parent / "racing"
SEED_OF_ORDER = 0
COMPILING_MINUTES = 0.01
"""Of the copy of a run that compiles for it: over before its first steps are."""


@click.command()
@click.option(
    "--text",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="A folder with text files, also in folders below it.",
)
@click.option("--minutes", default=5.0, show_default=True, type=click.FloatRange(0.1))
@click.option("--sides", default=",".join(NAMES), show_default=True)
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--rates", help="Learning rates to try, instead of a side's own: 0.001,0.002")
@click.option("--size", type=click.Choice(list(SIZES)), help="[default: by the device]")
@click.option("--max-bytes", default=200_000_000, show_default=True, type=click.IntRange(10_000))
@click.option("--into", required=True, type=click.Path(path_type=Path), help="For all files.")
@click.option("--prepare", is_flag=True, help="Only build the dataset, to be taken elsewhere.")
@click.option("--torch-python", help="A Python with torch and numpy, instead of uv's.")
def main(
    text: Path,
    minutes: float,
    sides: str,
    seeds: int,
    rates: str | None,
    size: str | None,
    max_bytes: int,
    into: Path,
    prepare: bool,
    torch_python: str | None,
) -> None:
    """Print a table of bits per byte, write it to race.json, and draw a chart."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process only asks for the device
    device = jax.devices()[0]
    chosen = SIZES[size or ("cpu" if device.platform == "cpu" else "gpu")]
    given = [float(rate) for rate in rates.split(",")] if rates else None
    racing = list(_entries(sides, minutes, seeds, chosen, given))
    into.mkdir(parents=True, exist_ok=True)
    _make_dataset(text, into, chosen.vocab, max_bytes)
    if prepare:
        return
    _save_for_torch(into, chosen)
    for group in racing:
        for entry in group:
            if entry.side == PYTORCH:
                _train_torch(entry, chosen, into, torch_command(torch_python))
            else:
                _train(entry, chosen, into)
    bits_per_nat = _bits_per_nat(into, [entry for group in racing for entry in group])
    results = [_result(group, into, bits_per_nat) for group in racing]
    rivals = [
        result for group, result in zip(racing, results, strict=True) if group[0].side == PYTORCH
    ]
    name = processor() if device.platform == "cpu" else device.device_kind
    longest = max(entry.minutes for group in racing for entry in group)
    _report(results, rivals or results, f"{longest:g} min on {name}", into)


def _entries(
    sides: str, minutes: float, seeds: int, size: Size, rates: list[float] | None
) -> Iterator[list[Entry]]:
    """Yield a group of seeds for each side and learning rate."""
    for side in sides.split(","):
        name, _, own = side.partition(":")
        if name not in NAMES:
            raise click.UsageError(f"--sides {side}: one of {', '.join(NAMES)}")
        for rate in rates or [size.rates[name]]:
            yield [Entry(name, float(own or minutes), seed, rate) for seed in range(seeds)]


def _make_dataset(text: Path, into: Path, vocab: int, max_bytes: int) -> None:
    """Build the dataset from the text files of a folder, in random order, up to so many bytes."""
    if (into / "datasets" / NAME / "dataset.json").exists():
        return
    files = sorted(path for path in text.rglob("*") if path.is_file() and not path.is_symlink())
    random.Random(SEED_OF_ORDER).shuffle(files)
    documents, left = into / "documents.jsonl", max_bytes
    with documents.open("w", encoding="utf-8") as file:
        for path in files:
            try:
                content = path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue
            if 0 < len(content) <= left:
                file.write(json.dumps({"text": content}) + "\n")
                left -= len(content.encode())
    options = ["--vocab-size", str(vocab), "--datasets-dir", str(into / "datasets")]
    command = ["download_dataset.py", "--jsonl", str(documents), "--name", NAME, *options]
    _run([sys.executable, *command, "--validation-percent", "2"])
    documents.unlink()


def _save_for_torch(into: Path, size: Size) -> None:
    """Save the tokens as NumPy files: a row for each sequence of a validation."""
    dataset, length = open_dataset(NAME, into / "datasets"), size.length
    if not (into / "train.npy").exists():
        np.save(into / "train.npy", np.asarray(dataset.tokens(TRAIN)[:]))
    tokens = np.asarray(dataset.tokens(VALIDATION)[: size.validation * length + 1])
    starts = range(0, len(tokens) - length, length)
    np.save(into / "validation.npy", np.stack([tokens[at : at + length + 1] for at in starts]))


def _train(entry: Entry, size: Size, into: Path) -> None:
    run = into / entry.name
    if not run.exists():  # each seed has programs of its own
        with tempfile.TemporaryDirectory() as folder:
            short = entry._replace(minutes=COMPILING_MINUTES)
            _train_run(Path(folder) / "compiling", short, size, into)
    _train_run(run, entry, size, into)
    click.echo(f"{entry.name}: {Curve.of_run(run / 'metrics.jsonl').losses[-1]:.4f}", err=True)


def _train_run(run: Path, entry: Entry, size: Size, into: Path) -> None:
    run.mkdir(exist_ok=True)
    files = ("model.json", "train.json")
    for file, config in zip(files, configs(entry, size), strict=True):
        (run / file).write_text(json.dumps(config, indent=2) + "\n")
    datasets = ["--datasets-dir", str(into / "datasets")]
    _run([sys.executable, "train.py", str(run.resolve()), *datasets, "--quiet"])


def _train_torch(entry: Entry, size: Size, into: Path, python: Sequence[str]) -> None:
    path = into / f"{entry.name}.jsonl"
    if not path.exists():
        asked = size._asdict() | {
            "sequences": size.sequences,
            "train": str(into.resolve() / "train.npy"),
            "validation": str(into.resolve() / "validation.npy"),
            "minutes": entry.minutes,
            "seed": entry.seed,
            "learning_rate": entry.rate,
            "threads": core_count(),
            "validations": VALIDATIONS,
            "dtype": fastest_dtype(),
        }
        printed = _run([*python, str(FOLDER / "torch_gpt2.py"), json.dumps(asked)])
        path.write_text(printed)
    click.echo(f"{entry.name}: {Curve.of_lines(path).losses[-1]:.4f}", err=True)


def _run(command: Sequence[str]) -> str:
    """Run a command at the root; return what it printed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    del environment["XLA_PYTHON_CLIENT_PREALLOCATE"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise click.ClickException(failure(" ".join(command[:3]), ended.stderr))
    return ended.stdout


def _result(group: Sequence[Entry], into: Path, bits_per_nat: float) -> Result:
    first = group[0]
    name = f"{first.side} at {first.rate:g}, {first.minutes:g} min"
    if first.side == PYTORCH:
        curves = [Curve.of_lines(into / f"{entry.name}.jsonl") for entry in group]
    else:
        curves = [Curve.of_run(into / entry.name / "metrics.jsonl") for entry in group]
    return Result(name, curves, bits_per_nat)


def _bits_per_nat(into: Path, entries: Sequence[Entry]) -> float:
    """Return the bits per byte at a loss of one nat per token, which runs of Rungs record."""
    for entry in entries:
        for step in reversed(metrics.read(into / entry.name / "metrics.jsonl")):
            if step.bits_per_byte and step.validation_loss:
                return step.bits_per_byte / step.validation_loss
    raise click.UsageError("--sides: at least one of Rungs, which measures bits per byte")


def _report(results: Sequence[Result], rivals: Sequence[Result], title: str, into: Path) -> None:
    """Print the table, write it, and draw the chart. The goal is the best of the rivals."""
    goal = float(min(result.final.mean() for result in rivals))
    nats = goal / results[0].bits_per_nat
    rows = [result.as_json(nats) for result in results]
    (into / "race.json").write_text(json.dumps(rows, indent=2) + "\n")
    header = ["side", "bits per byte at the end", f"minutes to {goal:.4f}, by seed", "steps"]
    click.echo(title)
    click.echo(align_columns([header, *(result.row(nats) for result in results)], left=1))
    draw = functools.partial(race_chart, title, goal=goal)
    with drawing.use_style("plain"):
        drawing.write_all({"race.png": draw}, results, into)


if __name__ == "__main__":
    run_command(main)

"""An experiment in minutes, and GPT-2 in PyTorch beside it: who has the lowest loss when?

Conducts the experiment, whose base is the GPT-2 that PyTorch trains, too: with the same seeds, on
the tokens of the same dataset, validated on the same tokens. The minutes have validations in them.
PyTorch's begin after compilation; those of Rungs have start, compilation and checkpoints in them.
Killed and run again, the command goes on with what is missing.
"""

from rungs.common.command import run_command

import functools
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from benchmarks.racing.chart import race_chart
from benchmarks.racing.results import Curve, Result
from benchmarks.side_process import failure
from benchmarks.training_speed.train_speed import torch_command
from rungs.common.machine import core_count, processor
from rungs.common.shown_text import align_columns
from rungs.config.run_config import RunConfig, load_run
from rungs.data.catalog import find_datasets_dir, open_dataset
from rungs.data.tokens.dataset import TRAIN, VALIDATION
from rungs.experiments.conduct import Conductor
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.workers import Local
from rungs.optim.precision import fastest_dtype
from rungs.report import drawing
from rungs.run import metrics

ROOT = Path(__file__).parents[1]
VALIDATIONS = 10
"""Of PyTorch's side."""


@click.command()
@click.argument("experiment", default="race")
@click.option("--datasets-dir", type=click.Path(path_type=Path))
@click.option("--torch-minutes", type=float, help="Of PyTorch.  [default: as the experiment's]")
@click.option("--torch-python", help="A Python with torch and numpy, instead of uv's.")
def main(
    experiment: str,
    datasets_dir: Path | None,
    torch_minutes: float | None,
    torch_python: str | None,
) -> None:
    """Print a table of bits per byte, write it to race.json, and draw race.png."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # this process only asks for the device
    folder, datasets = ExperimentFolder.find(experiment), find_datasets_dir(datasets_dir)
    with folder.lock():
        conductor = Conductor(folder, datasets, Local(1))
        if code := conductor.conduct():
            raise SystemExit(code)
    minutes = conductor.experiment.budget and conductor.experiment.budget.minutes
    if not minutes:
        raise click.UsageError(f"{folder.path}: its budget is not in minutes")
    groups: dict[str, list[Path]] = {}
    for one in conductor.outcomes.values():
        groups.setdefault(one.group, []).append(folder.runs / one.run)
    base, *_ = groups.values()
    torch = _train_torch(
        folder, load_run(base[0]), len(base), torch_minutes or minutes, datasets, torch_python
    )
    bits = _bits_per_nat(base[0])
    results = [
        Result(name, [Curve.of_run(run / "metrics.jsonl") for run in runs], bits)
        for name, runs in groups.items()
    ]
    results.append(Result("PyTorch", [Curve.of_lines(path) for path in torch], bits))
    device = jax.devices()[0]
    name = processor() if device.platform == "cpu" else device.device_kind
    _report(results, f"{minutes:g} min on {name}", folder.path)


def _train_torch(
    folder: ExperimentFolder,
    config: RunConfig,
    seeds: int,
    minutes: float,
    datasets_dir: Path,
    python: str | None,
) -> list[Path]:
    """Train PyTorch's GPT-2 with each seed, if it isn't there; return the files with its losses."""
    asked = _asked(config, folder.path / "pytorch", datasets_dir) | {"minutes": minutes}
    script = Path(__file__).parent / "racing/torch_gpt2.py"
    found = []
    for seed in range(seeds):
        path = folder.path / "pytorch" / f"seed-{seed}.jsonl"
        if not path.exists():
            one = json.dumps({**asked, "seed": seed})
            path.write_text(_run([*torch_command(python), str(script), one]))
        found.append(path)
        click.echo(f"PyTorch, seed {seed}: {Curve.of_lines(path).losses[-1]:.4f}", err=True)
    return found


def _asked(config: RunConfig, folder: Path, datasets_dir: Path) -> dict[str, Any]:
    """Return what PyTorch's script is told, with the tokens as NumPy files."""
    model, train, length = config.model, config.train, config.sequence_length
    folder.mkdir(exist_ok=True)
    dataset = open_dataset(next(iter(train.datasets)), datasets_dir)
    np.save(folder / "train.npy", np.asarray(dataset.tokens(TRAIN)[:]))
    tokens = np.asarray(dataset.tokens(VALIDATION)[: train.validation_tokens + 1])
    starts = range(0, len(tokens) - length, length)
    np.save(folder / "validation.npy", np.stack([tokens[at : at + length + 1] for at in starts]))
    return {
        "vocab": model.vocab_size,
        "length": length,
        "width": model.emb_dim,
        "heads": model.n_heads,
        "layers": model.n_layers,
        "microbatch": train.microbatch_size,
        "sequences": train.sequences_per_step,
        "train": str((folder / "train.npy").resolve()),
        "validation": str((folder / "validation.npy").resolve()),
        "learning_rate": train.learning_rate,
        "threads": core_count(),
        "validations": VALIDATIONS,
        "dtype": fastest_dtype(),
    }


def _run(command: Sequence[str]) -> str:
    """Run a command at the root; return what it printed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise click.ClickException(failure(" ".join(command[:3]), ended.stderr))
    return ended.stdout


def _bits_per_nat(run: Path) -> float:
    """Return the bits per byte at a loss of one nat per token, which runs record."""
    last = [step for step in metrics.read(run / "metrics.jsonl") if step.validation_loss][-1]
    assert last.bits_per_byte
    assert last.validation_loss
    return last.bits_per_byte / last.validation_loss


def _report(results: Sequence[Result], title: str, into: Path) -> None:
    """Print the table, write it, and draw the chart. The goal is what PyTorch reaches."""
    goal = float(results[-1].final.mean())
    nats = goal / results[-1].bits_per_nat
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

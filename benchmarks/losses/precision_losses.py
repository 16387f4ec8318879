"""How far the losses of training in 16 bits are from float32's, next to the noise of seeds.

Trains the same model on the same batches of the embedded dataset with each variant, in one process,
and compares the loss of each step, and the mean of the last steps, with float32's. XLA's CPU
compiler is told to round where the program does, as a GPU's does: by default it keeps float32
between operations in 16 bits.
"""

from rungs.common.command import run_command

import dataclasses
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np

from benchmarks.training_speed.rungs_side import batches, loss_of, run_config
from benchmarks.training_speed.speed_table import Shape
from benchmarks.training_speed.train_speed import write_batches
from rungs.config.run_config import RunConfig
from rungs.objectives.table import make_train_step
from rungs.parallel import jax_setup
from rungs.parallel.devices import create_run_mesh
from rungs.step.state import copy_bytes, create_model_and_optimizer
from rungs.training.dataset_learner import PrefetchedBatches

SHAPE = Shape(vocab=8192, length=256, width=256, heads=8, layers=4)
LAST = 50
WARMUP_PERCENT = 5.0
"""Without a warm-up the losses of the first steps are a matter of chance in every dtype."""
ROUND_AS_WRITTEN = "--xla_allow_excess_precision=false"
EXACT = "float32"
VARIANTS: dict[str, dict[str, Any]] = {
    EXACT: {},
    "bfloat16": {"compute_dtype": "bfloat16"},
    "bfloat16, logits too": {"compute_dtype": "bfloat16", "logits_dtype": "bfloat16"},
    "bfloat16, FP8": {"compute_dtype": "bfloat16", "matmul_dtype": "float8"},
    "float32, FP8": {"matmul_dtype": "float8"},
    "float16": {"compute_dtype": "float16"},
    "float32, seed 1": {"seed": 1},
    "float32, seed 2": {"seed": 2},
}
"""By name: keys of train.json that differ."""


@click.command()
@click.option("--steps", default=300, show_default=True, type=click.IntRange(1))
@click.option("--variant", "chosen", multiple=True, type=click.Choice([*VARIANTS][1:]))
@click.option("--learning-rate", default=1e-3, show_default=True)
@click.option("--microbatches", default=2, show_default=True, type=click.IntRange(1))
@click.option("--sequences", default=8, show_default=True, help="In a microbatch.")
@click.option("--context-length", default=256, show_default=True)
def main(
    steps: int,
    chosen: tuple[str, ...],
    learning_rate: float,
    microbatches: int,
    sequences: int,
    context_length: int,
) -> None:
    """Print a line for each variant."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ROUND_AS_WRITTEN}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "batches.npy"
        write_batches(path, (microbatches, sequences, context_length + 1), steps)
        tokens = shuffle(np.load(path))
    exact = losses(EXACT, learning_rate, tokens)
    report(EXACT, exact, exact)
    for variant in chosen or [*VARIANTS][1:]:
        report(variant, losses(variant, learning_rate, tokens), exact)


def shuffle(tokens: np.ndarray) -> np.ndarray:
    """Return the sequences in a random order, as runs on one text have them. In the text's own
    order some batches are so unlike those before that their loss is a matter of chance."""
    rows = tokens.reshape(-1, tokens.shape[-1])
    return np.random.default_rng(0).permutation(rows).reshape(tokens.shape)


def losses(variant: str, learning_rate: float, tokens: np.ndarray) -> np.ndarray:
    """Return the loss of each step.

    Args:
        tokens: (steps, A, B, S + 1).
    """
    steps, microbatches, sequences, length = tokens.shape
    shape = dataclasses.asdict(SHAPE) | {"length": length - 1}
    asked = shape | {"devices": "auto", "dtype": "float32", "learning_rate": learning_rate}
    model_config, train = run_config(asked, microbatches, sequences)
    changes = {"warmup_period_percent": WARMUP_PERCENT, **VARIANTS[variant]}
    run = RunConfig(model_config, train.model_copy(update=changes))
    jax_setup.prepare(run.train, partial(copy_bytes, run))
    mesh = create_run_mesh(run.train, run.model, None)
    model, optimizer = create_model_and_optimizer(run, steps, mesh)
    step = make_train_step(run.train, mesh)
    placed = iter(PrefetchedBatches(mesh, batches(tokens), sequences))
    return np.array([loss_of(step(model, optimizer, *next(placed))) for _ in range(steps)])


def report(variant: str, found: np.ndarray, exact: np.ndarray) -> None:
    differences = np.abs(found / exact - 1)
    last = abs(found[-LAST:].mean() / exact[-LAST:].mean() - 1)
    click.echo(
        f"{variant:20} {jax.device_count()} {jax.devices()[0].device_kind}: loss {found[0]:.4f} to"
        f" {found[-LAST:].mean():.4f} (mean of the last {LAST}); from float32 at most"
        f" {differences.max():.2%} in a step, {np.median(differences):.3%} in their median,"
        f" {last:.3%} in that mean"
    )


if __name__ == "__main__":
    run_command(main)

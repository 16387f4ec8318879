"""What a measurement of the layers (`watch_interval`) costs beside a training step.

A model of 8 layers, 256 wide, on one device. In each turn some steps, then a measurement, each
timed by itself. It takes the step again on copies and measures the layers. The share of the time
that an interval costs is its time divided by that of so many steps.
"""

from rungs.common.command import run_command

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import jax

from benchmarks.one_step import TOTAL_STEPS, random_sequences, train_config
from benchmarks.report import spread
from rungs.common.shown_text import align_columns
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.inspect.watch import make_measurement
from rungs.model.remat import layer_loop
from rungs.objectives.next_token import NextToken
from rungs.objectives.table import make_train_step
from rungs.parallel.sharding import one_device, place_batch
from rungs.step.state import create_model_and_optimizer

INTERVALS = (50, 100, 200, 500)
STEPS = 3
"""Steps in each turn."""


@click.command()
@click.option("--turns", default=7, show_default=True, type=click.IntRange(1))
@click.option("--compute-dtype", default="float32", show_default=True)
@click.option("--microbatches", default=1, show_default=True, type=click.IntRange(1))
def main(turns: int, compute_dtype: str, microbatches: int) -> None:
    """Print the time of a step, of a measurement, and what intervals cost."""
    model = ModelConfig(vocab_size=4096, context_length=256, emb_dim=256, n_layers=8, n_heads=4)
    train = train_config(8, microbatches).model_copy(update={"compute_dtype": compute_dtype})
    train = train.with_choices(
        compute_dtype=train.compute_dtype, **layer_loop(train, model).as_keys()
    )
    run, mesh = RunConfig(model, train), one_device()
    sequences = random_sequences(run)
    batch = place_batch(mesh, sequences[..., :-1], sequences[..., 1:], None)
    state = create_model_and_optimizer(run, TOTAL_STEPS, mesh)
    step = make_train_step(train, mesh)
    measure = make_measurement(NextToken(train), train, mesh)
    jax.config.update("jax_enable_compilation_cache", False)
    first_step, first_measurement = (
        seconds(program, *state, *batch) for program in (step, measure)
    )
    steps, measured, ratios = [], [], []
    for _ in range(turns):
        own = [seconds(step, *state, *batch) for _ in range(STEPS)]
        steps.append(statistics.median(own))
        measured.append(seconds(measure, *state, *batch))
        ratios.append(measured[-1] / steps[-1])
    rows = [
        ("step, ms", spread([1000 * one for one in steps], digits=0)),
        ("measurement, ms", spread([1000 * one for one in measured], digits=0)),
        ("measurement ÷ step", spread(ratios)),
        ("first step, with compilation, s", f"{first_step:.1f}"),
        ("first measurement, with compilation, s", f"{first_measurement:.1f}"),
        *(
            (
                f"watch_interval {interval}, % of the time",
                spread([100 * r / interval for r in ratios]),
            )
            for interval in INTERVALS
        ),
    ]
    click.echo(f"Medians of {turns} turns (lowest to highest).\n\n{align_columns(rows, left=1)}")


def seconds(program: Callable[..., Any], *arguments: Any) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(jax.tree.leaves(program(*arguments)))
    return time.perf_counter() - begin


if __name__ == "__main__":
    run_command(main)

"""A side of `train_speed.py`: the step that training runs, fed and read as the trainer does it.

Reads how many steps to take from each line of stdin and answers with the loss of the last one.
"""

import itertools
import json
import math
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.training_speed.initial_weights import rungs_names
from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.objectives.table import make_train_step
from rungs.parallel import jax_setup
from rungs.parallel.devices import create_run_mesh
from rungs.step.state import copy_bytes, create_model_and_optimizer
from rungs.step.train_step import StepResult
from rungs.training.dataset_learner import PrefetchedBatches

TOTAL_STEPS = 1_000_000
"""So many that the learning rate stays at its peak."""


def main() -> None:
    asked = json.loads(sys.argv[1])
    sequences = np.load(asked["batches"])  # steps, A, B, S + 1
    run = run_config(asked, *sequences.shape[1:3])
    jax_setup.prepare(run.train, partial(copy_bytes, run))
    mesh = create_run_mesh(run.train, run.model, None)
    initial = rungs_names(dict(np.load(asked["weights"])), asked["layers"], asked["heads"])
    weights = jax.tree.map(jnp.asarray, initial)
    model, optimizer = create_model_and_optimizer(run, TOTAL_STEPS, mesh, weights)
    train_step = make_train_step(run.train, mesh)
    placed = iter(PrefetchedBatches(mesh, batches(sequences), run.train.microbatch_size))
    for line in sys.stdin:
        unread: StepResult | None = None
        for _ in range(int(line)):
            result = train_step(model, optimizer, *next(placed))
            if unread is not None:
                loss_of(unread)
            unread = result
        assert unread is not None
        print(json.dumps(loss_of(unread)), flush=True)


def run_config(asked: dict[str, Any], accumulation: int, microbatch: int) -> RunConfig:
    model = ModelConfig(
        vocab_size=asked["vocab"],
        context_length=asked["length"],
        emb_dim=asked["width"],
        n_heads=asked["heads"],
        n_layers=asked["layers"],
    )
    devices = asked["devices"]
    train = TrainConfig(
        dataset="none",
        checkpoint_interval=1,
        microbatch_size=microbatch,
        gradient_accumulation_steps=accumulation,
        learning_rate=asked["learning_rate"],
        warmup_period_percent=0,
        beta2=0.95,
        weight_decay=0.1,
        clipping_max_norm=1.0,
        compute_dtype=asked["dtype"],
        scan_unroll=asked.get("unroll", "auto"),
        sharding=None if devices == "auto" else ShardingConfig(mode="dp", data=devices),
    )
    return RunConfig(model, train)


def batches(sequences: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield inputs and targets of each step, again and again."""
    for step in itertools.cycle(sequences):
        yield step[..., :-1], step[..., 1:]


def loss_of(result: StepResult) -> float:
    """Return the step's loss, or NaN; reads all of the result, as the trainer does."""
    loss = StepResult(*jax.device_get(tuple(result))).loss
    return math.nan if loss is None else loss


if __name__ == "__main__":
    main()

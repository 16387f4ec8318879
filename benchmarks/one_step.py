"""A training step by itself: traced from shapes, or with arrays to compile and time it."""

import time
from typing import Any

import jax
import numpy as np

from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.objectives.table import make_train_step
from rungs.parallel.sharding import one_device, place_batch
from rungs.step.state import create_model_and_optimizer

TOTAL_STEPS = 1000


def train_config(
    microbatch_size: int, microbatches: int, sharding: ShardingConfig | None = None
) -> TrainConfig:
    return TrainConfig(
        dataset="none",
        microbatch_size=microbatch_size,
        gradient_accumulation_steps=microbatches,
        learning_rate=0.001,
        clipping_max_norm=1.0,
        checkpoint_interval=1,
        sharding=sharding,
    )


def batch_shape(run: RunConfig) -> tuple[int, int, int]:
    """Return A, B and S + 1 of a global step's sequences."""
    train = run.train
    return (
        train.gradient_accumulation_steps,
        train.microbatch_size,
        run.model.context_length + 1,
    )


def random_sequences(run: RunConfig) -> np.ndarray:
    """Return random tokens for a global step, of shape (A, B, S + 1)."""
    rng = np.random.default_rng(0)
    return rng.integers(run.model.vocab_size, size=batch_shape(run), dtype=np.int32)


class TimedStep:
    """A run's step on one device with its model, optimizer and a batch of random tokens."""

    def __init__(self, run: RunConfig, starts_ABS: np.ndarray | None = None) -> None:
        self._train, self._mesh = run.train, one_device()
        sequences = random_sequences(run)
        batch = place_batch(self._mesh, sequences[..., :-1], sequences[..., 1:], starts_ABS)
        state = create_model_and_optimizer(run, TOTAL_STEPS, self._mesh)
        self._arguments = *state, *batch

    def lower(self) -> Any:
        """Trace the step again."""
        step: Any = make_train_step(self._train, self._mesh)
        return step.lower(*self._arguments)

    def seconds(self, compiled: Any) -> float:
        """Take a step and wait for it."""
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*self._arguments))
        return time.perf_counter() - begin

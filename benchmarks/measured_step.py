"""A global step with all that it takes, to be compiled and run by itself."""

import time
from typing import Any

import jax
import numpy as np

from rungs.config.run_config import RunConfig
from rungs.parallel.mesh import one_device, place_batch
from rungs.step.state import AbstractState
from rungs.step.train_step import make_train_step

TOTAL_STEPS = 1_000_000
"""More than are taken."""


class MeasuredStep:
    """The step of a run on this machine's first device, with random weights and a batch of random
    tokens. A run's own way to create its state would take longer to compile than the step."""

    def __init__(self, run: RunConfig) -> None:
        self._train, self._mesh = run.train, one_device()
        shape = (
            run.train.gradient_accumulation_steps,
            run.train.microbatch_size,
            run.model.context_length + 1,
        )
        rng = np.random.default_rng(0)
        tokens_ABS = rng.integers(run.model.vocab_size, size=shape, dtype=np.int32)
        batch = place_batch(self._mesh, tokens_ABS[..., :-1], tokens_ABS[..., 1:])
        state = AbstractState(run, TOTAL_STEPS, self._mesh)
        weights = {
            name: place(0.02 * rng.standard_normal(leaf.shape, np.float32), leaf)
            for name, leaf in state.weights.items()
        }
        optimizer = {n: place(np.zeros(leaf.shape), leaf) for n, leaf in state.optimizer.items()}
        self._arguments = *state.fill(weights, optimizer), *batch

    def lowered(self) -> Any:
        """Traced anew, not compiled yet."""
        step = make_train_step(self._train, self._mesh)
        return step.lower(*self._arguments)  # type: ignore[attr-defined]

    def seconds(self, compiled: Any) -> float:
        """Take a step and wait for it."""
        begin = time.perf_counter()
        jax.block_until_ready(compiled(*self._arguments))
        return time.perf_counter() - begin


def place(values: np.ndarray, leaf: jax.ShapeDtypeStruct) -> jax.Array:
    """Values of the type and in the place of an abstract array."""
    return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

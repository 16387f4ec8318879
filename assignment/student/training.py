"""The training loop. Task: `assignment/tasks/training.md`.

A batch is a pair of arrays of tokens, inputs_BS and targets_BS (B sequences, S positions), as
`get_batch` returns it.
"""

import os
from collections.abc import Callable, Iterable

import jax
from flax import nnx

Batch = tuple[jax.Array, jax.Array]


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Update a model once, in place, and return the loss before the update, a scalar, in nats."""
    raise NotImplementedError("train_step: see assignment/tasks/training.md")


def evaluate(model: nnx.Module, batches: Iterable[Batch]) -> float:
    """Return the mean loss over batches of one size, in nats. The model stays as it is.

    Raises:
        ValueError: there are no batches.
    """
    raise NotImplementedError("evaluate: see assignment/tasks/training.md")


def train(
    model: nnx.Module,
    optimizer: nnx.Optimizer,
    batch_of: Callable[[int], Batch],
    steps: int,
    checkpoint: str | os.PathLike[str],
    interval: int = 100,
) -> list[float]:
    """Train until `steps` steps are done, and return the losses of the steps that this call took.

    If the checkpoint is there, training goes on after its last step, with the result that it would
    have had without the interruption, bit for bit.

    Args:
        batch_of: the batch of a step, counted from 0; the same each time it is asked.
        checkpoint: a file, written after every `interval` steps and after the last one.
    """
    raise NotImplementedError("train: see assignment/tasks/training.md")

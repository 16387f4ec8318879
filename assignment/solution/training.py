"""The training loop. Task: `assignment/tasks/training.md`.

A batch is a pair of arrays of tokens, inputs_BS and targets_BS (B sequences, S positions), as
`get_batch` returns it.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from .checkpoint import load_checkpoint, save_checkpoint
from .loss import cross_entropy

Batch = tuple[jax.Array, jax.Array]


@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Update a model once, in place, and return the loss before the update, a scalar, in nats."""

    def loss(model: nnx.Module) -> jax.Array:
        return _loss(model, batch)

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def evaluate(model: nnx.Module, batches: Iterable[Batch]) -> float:
    """Return the mean loss over batches of one size, in nats. The model stays as it is.

    Raises:
        ValueError: there are no batches.
    """
    losses = [float(_compiled_loss(model, batch)) for batch in batches]
    if not losses:
        raise ValueError("no batches to evaluate on")
    return float(np.mean(losses))


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
    done = load_checkpoint(checkpoint, model, optimizer) if Path(checkpoint).exists() else 0
    losses = []
    for step in range(done, steps):
        losses.append(train_step(model, optimizer, batch_of(step)))
        if (step + 1) % interval == 0 or step + 1 == steps:
            save_checkpoint(model, optimizer, step + 1, checkpoint)
    return [float(loss) for loss in losses]


def _loss(model: nnx.Module, batch: Batch) -> jax.Array:
    inputs_BS, targets_BS = batch
    return cross_entropy(model(inputs_BS), targets_BS)


_compiled_loss = nnx.jit(_loss)

"""The compiled global step, and evaluation without one.

Axes as in `model.py`, and A for the microbatches of one global step.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from layers import NO_DROPOUT, Dropout
from model import GPT
from optimizer import MultiSteps
from sharding import place_batch
from train_config import TrainConfig


class StepResult(NamedTuple):
    """The small arrays that a global step hands to the host."""

    losses_A: Array
    """Loss of each microbatch, nats per token."""
    finite_A: Array
    """Whether the microbatch counted: loss and gradient were finite."""
    learning_rate: Array
    gradient_norm: Array
    clipped: Array


DROPOUT = 0xD0
"""Sets the random numbers of dropout apart from those that start the weights."""

TrainStep = Callable[[GPT, MultiSteps, Array, Array], StepResult]
EvaluationStep = Callable[[GPT, Array, Array], Array]


def make_train_step(train: TrainConfig) -> TrainStep:
    """A compiled function of (model, optimizer, inputs_ABS, targets_ABS) that trains one step.

    Model and optimizer are updated in place, their old memory reused.
    """

    def train_step(
        model: GPT, optimizer: MultiSteps, inputs_ABS: Array, targets_ABS: Array
    ) -> StepResult:
        dropout_key = jax.random.fold_in(jax.random.key(train.seed), DROPOUT)
        step_key = jax.random.fold_in(dropout_key, optimizer.step[...])
        graph, params = nnx.split(model)

        def loss_of(params: nnx.State, inputs_BS: Array, targets_BS: Array, key: Array) -> Array:
            dropout = Dropout(train.drop_rate, key) if train.drop_rate else NO_DROPOUT
            logits_BSV = nnx.merge(graph, params)(inputs_BS, dropout, dtype_of(train))
            return sequence_losses(logits_BSV, targets_BS).mean()

        def microbatch(carry: Any, batch: tuple[Array, Array, Array]) -> tuple[Any, Any]:
            gradient_sum, finite_count = carry
            inputs_BS, targets_BS, index = batch
            key = jax.random.fold_in(step_key, index)
            loss, gradient = jax.value_and_grad(loss_of)(params, inputs_BS, targets_BS, key)
            finite = all_finite((loss, gradient))
            gradient_sum = jax.tree.map(
                lambda total, g: total + jnp.where(finite, g, 0), gradient_sum, gradient
            )
            return (gradient_sum, finite_count + finite), (loss, finite)

        nothing = (jax.tree.map(jnp.zeros_like, params), jnp.zeros((), jnp.int32))
        batches = (inputs_ABS, targets_ABS, jnp.arange(len(inputs_ABS)))
        (gradient_sum, finite_count), (losses_A, finite_A) = jax.lax.scan(
            microbatch, nothing, batches
        )
        update = optimizer.update(model, gradient_sum, finite_count)
        return StepResult(
            losses_A,
            finite_A & update.applied,
            update.learning_rate,
            update.gradient_norm,
            update.clipped,
        )

    return nnx.jit(train_step, donate_argnums=(0, 1))


def make_evaluation_step(train: TrainConfig) -> EvaluationStep:
    """A compiled function of (model, inputs_BS, targets_BS) to losses_B, without dropout."""

    def evaluation_step(model: GPT, inputs_BS: Array, targets_BS: Array) -> Array:
        return sequence_losses(model(inputs_BS, NO_DROPOUT, dtype_of(train)), targets_BS)

    return nnx.jit(evaluation_step)


def sequence_losses(logits_BSV: Array, targets_BS: Array) -> Array:
    """Cross-entropy of each sequence, the mean over its tokens: losses_B in nats per token."""
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(logits_BSV, targets_BS)
    return losses_BS.mean(axis=-1)


def all_finite(tree: Any) -> Array:
    """Whether no element of any array in the tree is NaN or infinite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def dtype_of(train: TrainConfig) -> jnp.dtype:
    """The type of activations and products."""
    return jnp.dtype(train.compute_dtype)


def mean_loss(
    model: GPT,
    evaluation_step: EvaluationStep,
    batches: Iterable[tuple[np.ndarray, np.ndarray, int]],
    mesh: Mesh,
) -> float:
    """Mean cross-entropy over all real rows of the batches, in nats per token.

    Args:
        batches: inputs_BS, targets_BS and how many rows count; the rest is padding.
    """
    pending = [
        (evaluation_step(model, *place_batch(mesh, inputs_BS, targets_BS)), rows)
        for inputs_BS, targets_BS, rows in batches
    ]
    losses = [jax.device_get(losses_B)[:rows] for losses_B, rows in pending]
    return float(np.concatenate(losses).mean(dtype=np.float64))

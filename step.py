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

from feed_forward import Routing
from layers import NO_DROPOUT, Dropout
from model import GPT
from optimizer import MultiSteps
from sharding import place_batch
from train_config import TrainConfig


class StepResult(NamedTuple):
    """The small arrays that a global step hands to the host."""

    losses_A: Array
    """Cross-entropy of each microbatch, nats per target that counts."""
    weights_A: Array
    """Share of each microbatch's targets that count."""
    finite_A: Array
    """Whether the microbatch counted: loss and gradient were finite."""
    learning_rate: Array
    gradient_norm: Array
    clipped: Array
    routing: Routing | None
    """Mixture of experts: tokens per layer and expert (counts_LE) and the mean load-balancing
    loss, over all microbatches."""


DROPOUT = 0xD0
"""Sets the random numbers of dropout apart from those that start the weights."""

TrainStep = Callable[[GPT, MultiSteps, Array, Array], StepResult]
Told = tuple[Array, Array, Routing | None]
EvaluationStep = Callable[[GPT, Array, Array], tuple[Array, Array]]


def make_train_step(train: TrainConfig) -> TrainStep:
    """A compiled function of (model, optimizer, inputs_ABS, targets_ABS) that trains one step.

    Model and optimizer are updated in place, their old memory reused.
    """

    def train_step(
        model: GPT, optimizer: MultiSteps, inputs_ABS: Array, targets_ABS: Array
    ) -> StepResult:
        dropout_key = jax.random.fold_in(jax.random.key(train.seed), DROPOUT)
        step_key = jax.random.fold_in(dropout_key, optimizer.step[...])
        graph, *states = nnx.split(model, optimizer.wrt, ...)
        trained, frozen = states

        def objective_of(trained: nnx.State, *batch: Array) -> tuple[Array, Told]:
            return objective(train, nnx.merge(graph, trained, frozen), *batch)

        def microbatch(carry: Any, batch: tuple[Array, Array, Array]) -> tuple[Any, Any]:
            gradient_sum, weight_sum = carry
            inputs_BS, targets_BS, index = batch
            key = jax.random.fold_in(step_key, index)
            (_, told), gradient = jax.value_and_grad(objective_of, has_aux=True)(
                trained, inputs_BS, targets_BS, key
            )
            loss, weight, routing = told
            finite = all_finite((loss, gradient))
            gradient_sum = jax.tree.map(
                lambda total, g: total + jnp.where(finite, g, 0), gradient_sum, gradient
            )
            weight_sum += jnp.where(finite, weight, 0)
            return (gradient_sum, weight_sum), (loss / weight, weight, finite, routing)

        nothing = (jax.tree.map(jnp.zeros_like, trained), jnp.zeros((), jnp.float32))
        batches = (inputs_ABS, targets_ABS, jnp.arange(len(inputs_ABS)))
        (gradient_sum, weight_sum), told = jax.lax.scan(microbatch, nothing, batches)
        losses_A, weights_A, finite_A, routing = told
        update = optimizer.update(model, gradient_sum, weight_sum)
        return StepResult(
            losses_A,
            weights_A,
            finite_A & update.applied,
            update.learning_rate,
            update.gradient_norm,
            update.clipped,
            routing and Routing(routing.counts_E.sum(axis=0), routing.balance_loss.mean()),
        )

    return nnx.jit(train_step, donate_argnums=(0, 1))


def objective(
    train: TrainConfig, model: GPT, inputs_BS: Array, targets_BS: Array, key: Array
) -> tuple[Array, Told]:
    """What a microbatch adds to what training makes small, and what there is to tell of it.

    Args:
        key: of its dropout.

    Returns:
        The loss summed over the targets that count, plus the load-balancing loss for each of them,
        over the number of all targets; and that loss by itself, the share of targets that count,
        and the routing.
    """
    dropout = Dropout(train.drop_rate, key) if train.drop_rate else NO_DROPOUT
    logits_BSV, routing, _ = model.forward(inputs_BS, dropout, dtype_of(train))
    weight = (targets_BS >= 0).mean()
    loss = target_losses(logits_BSV, targets_BS).mean(axis=-1).mean()
    if routing is None:
        return loss, (loss, weight, None)
    balance = train.load_balancing_weight * routing.balance_loss.mean()
    return loss + weight * balance, (loss, weight, routing)


def make_evaluation_step(train: TrainConfig) -> EvaluationStep:
    """A compiled function of (model, inputs_BS, targets_BS), without dropout, to each sequence's
    summed loss and how many of its targets count."""

    def evaluation_step(model: GPT, inputs_BS: Array, targets_BS: Array) -> tuple[Array, Array]:
        logits_BSV = model(inputs_BS, NO_DROPOUT, dtype_of(train))
        return target_losses(logits_BSV, targets_BS).sum(axis=-1), (targets_BS >= 0).sum(axis=-1)

    return nnx.jit(evaluation_step)


def target_losses(logits_BSV: Array, targets_BS: Array) -> Array:
    """Cross-entropy at each target, losses_BS in nats; 0 where the target is negative, which
    means that it does not count."""
    losses_BS = optax.softmax_cross_entropy_with_integer_labels(
        logits_BSV, jnp.maximum(targets_BS, 0)
    )
    return jnp.where(targets_BS >= 0, losses_BS, 0)


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
    """Mean cross-entropy over all targets that count, in nats.

    Args:
        batches: inputs_BS, targets_BS and how many rows count; the rest is padding.
    """
    pending = [
        (evaluation_step(model, *place_batch(mesh, inputs_BS, targets_BS)), rows)
        for inputs_BS, targets_BS, rows in batches
    ]
    sums, counts = zip(
        *((loss[:rows], count[:rows]) for (loss, count), rows in map(jax.device_get, pending)),
        strict=True,
    )
    return float(np.concatenate(sums).sum(dtype=np.float64) / np.concatenate(counts).sum())

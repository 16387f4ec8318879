"""The compiled global step of training: gradients of the cross-entropy, then one update.

The optimizer updates global arrays, and the compiler partitions that.
Axes as in `model/gpt.py`, and A for the microbatches of one global step.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from rungs.config.train_config import TrainConfig
from rungs.model.feed_forward import Routing
from rungs.model.gpt import GPT
from rungs.model.layers import Dropout
from rungs.optim.multi_steps import MultiSteps, Update
from rungs.optim.precision import dtype_of
from rungs.parallel import collectives
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.names import TOKEN_AXES
from rungs.parallel.sharding import Layout, constrain
from rungs.step.compute import compute_of
from rungs.step.gradients import summed_gradients
from rungs.step.nonfinite import ALL_FINITE, GRADIENT_NORM


class StepResult(NamedTuple):
    """The small arrays that a global step returns to the host."""

    losses_A: Array
    """Cross-entropy of each microbatch, in nats per target that counts."""
    weights_A: Array
    """Fraction of each microbatch's targets that count."""
    first_nonfinite_A: Array
    """For each microbatch, the index in `nonfinite.checked_names` of the first array that was not
    finite; the microbatch is then left out. `nonfinite.ALL_FINITE` if all were finite."""
    skipped: Array
    """Whether the update was skipped because the step's loss was above the limit."""
    learning_rate: Array
    gradient_norm: Array
    clipped: Array
    routing: Routing | None
    """Mixture of experts: tokens per layer and expert (counts_LE), and the mean load-balancing loss
    of all microbatches."""
    loss_scale: Array | None
    """In float16, the factor by which the loss was multiplied."""

    @property
    def overflowed_A(self) -> np.ndarray:
        """Whether each microbatch was left out because gradients of the scaled loss overflowed; a
        smaller loss scale fixes that."""
        first_nonfinite_A = np.asarray(self.first_nonfinite_A)
        is_scaled = self.loss_scale is not None and self.loss_scale > 1
        return is_scaled & is_overflow(first_nonfinite_A)

    @property
    def finite_A(self) -> np.ndarray:
        """Whether each microbatch counted: its loss and gradient were finite, and so was the norm
        of the sum of all gradients."""
        return (np.asarray(self.first_nonfinite_A) == ALL_FINITE) & np.isfinite(self.gradient_norm)

    @property
    def loss(self) -> float | None:
        """Mean loss per target of the microbatches that counted or overflowed; None if there are
        none."""
        return self._mean_loss(self.finite_A | self.overflowed_A)

    @property
    def trained_loss(self) -> float | None:
        """Mean loss per target of the microbatches that counted; None if there are none."""
        return self._mean_loss(self.finite_A)

    def _mean_loss(self, of_A: np.ndarray) -> float | None:
        weights_A = np.asarray(self.weights_A)
        of_A = of_A & (weights_A > 0)
        losses = np.asarray(self.losses_A, np.float64)[of_A]
        return float(np.average(losses, weights=weights_A[of_A])) if len(losses) else None

    def nonfinite(self, checked_names: Sequence[str]) -> dict[int, str]:
        """Return the name of the first non-finite array for each microbatch that was left out,
        except for overflows of the scaled loss.

        Args:
            checked_names: `nonfinite.checked_names` of the model.
        """
        is_expected_A = self.finite_A | self.overflowed_A
        return {
            number: GRADIENT_NORM if first == ALL_FINITE else checked_names[first]
            for number, first in enumerate(np.asarray(self.first_nonfinite_A).tolist())
            if not is_expected_A[number]
        }


DROPOUT = 0xD0
"""Folded into the seed, so that dropout and initial weights use different random numbers."""

TrainStep = Callable[..., StepResult]


class MicrobatchAux(NamedTuple):
    """What an objective returns besides the loss, summed over devices."""

    losses_A: Array
    """Loss summed over the targets that count, divided by the number of all targets."""
    weights_A: Array
    """Fraction of the targets that count."""
    routing: Routing | None


def make_train_step(train: TrainConfig, mesh: Mesh | None = None) -> TrainStep:
    """Return a compiled function of (model, optimizer, inputs_ABS, targets_ABS) that trains one
    global step.

    It updates model and optimizer in place and reuses their memory. Optional arguments:
        starts_ABS: as for `GPT.forward`.
        loss_limit: in nats; if the step's loss is above it, model and optimizer stay unchanged.

    Args:
        mesh: the mesh that model and optimizer were created on; one device if absent.
    """
    layout = Layout.of(train.sharding, mesh)

    def train_step(
        model: GPT,
        optimizer: MultiSteps,
        inputs_ABS: Array,
        targets_ABS: Array,
        starts_ABS: Array | None = None,
        loss_limit: Array | float = jnp.inf,
    ) -> StepResult:
        key = dropout_key(train, optimizer.step[...])
        scaling = optimizer.loss_scale
        loss_scale = None if scaling is None else scaling.scale[...]
        batch = inputs_ABS, targets_ABS, starts_ABS
        gradient_sum, aux, first_nonfinite_A = gradients(
            train, layout, model, optimizer.wrt, batch, key, loss_scale
        )
        losses_A, weights_A, routing = aux
        is_finite_A = first_nonfinite_A == ALL_FINITE
        weight = jnp.where(is_finite_A, weights_A, 0).sum()
        skipped = jnp.where(is_finite_A, losses_A, 0).sum() > loss_limit * weight
        if scaling is not None:
            scaling.adapt(is_overflow(first_nonfinite_A).any())
        update = update_parts(layout, model, optimizer, gradient_sum, weight, skipped)
        return StepResult(
            losses_A / weights_A,
            weights_A,
            first_nonfinite_A,
            skipped,
            update.learning_rate,
            update.gradient_norm,
            update.clipped,
            routing and Routing(routing.counts_E.sum(axis=0), routing.balance_loss.mean()),
            loss_scale,
        )

    return nnx.jit(train_step, donate_argnums=(0, 1))


def update_parts(layout: Layout, model: GPT, optimizer: MultiSteps, *gradient: Any) -> Update:
    """Do `MultiSteps.update`, each device of its part of weights and moments.

    Afterwards model and optimizer lie again where they were created.
    """
    constrain(layout.for_updates, model, optimizer.wrt)
    update = optimizer.update(model, *gradient)
    constrain(layout, model)
    constrain(layout.for_updates, optimizer)
    return update


def is_overflow(first_nonfinite_A: Any) -> Any:
    """Return whether the loss was finite but a gradient was not."""
    return (first_nonfinite_A > 0) & (first_nonfinite_A != ALL_FINITE)


def dropout_key(train: TrainConfig, step: Array | int) -> Array:
    """Return the random key for a step's dropout."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(train.seed), DROPOUT), step)


def gradients(
    train: TrainConfig,
    layout: Layout,
    model: GPT,
    wrt: Any,
    batch: tuple[Array, Array, Array | None],
    key: Array,
    scale: Array | None = None,
) -> tuple[nnx.State, MicrobatchAux, Array]:
    """Return what `summed_gradients` does, for `objective`.

    Args:
        batch: inputs_ABS, targets_ABS, and starts_ABS or None.
    """
    return summed_gradients(
        functools.partial(objective, train),
        dtype_of(train),
        layout,
        model,
        wrt,
        batch,
        key,
        scale,
    )


def objective(
    train: TrainConfig,
    gatherer: WeightGatherer,
    model: GPT,
    inputs_BS: Array,
    targets_BS: Array,
    starts_BS: Array | None,
    sequences_B: Array,
    key: Array,
) -> tuple[Array, MicrobatchAux]:
    """Return this device's share of the objective on a microbatch, and the aux of the microbatch.

    The objective is the sum, over the targets that count, of their loss and the load-balancing
    loss, divided by the number of all targets on all devices.

    Args:
        model: with this device's part of the weights.
        starts_BS: as for `GPT.forward`.
        sequences_B: index of each sequence within the step; with `key` it determines its dropout.
    """
    gatherer.gather_outside_blocks(model)
    compute = compute_of(train, model, gatherer)
    dropout = Dropout.of(train.drop_rate, key, sequences_B)
    total, routing = model.summed_loss(inputs_BS, targets_BS, dropout, compute, starts_BS)
    devices = collectives.axis_size(*TOKEN_AXES)
    loss = total / (targets_BS.size * devices)
    summed_loss = collectives.psum(loss, *TOKEN_AXES)
    weight = collectives.psum((targets_BS >= 0).mean() / devices, *TOKEN_AXES)
    if routing is None:
        return loss, MicrobatchAux(summed_loss, weight, None)
    balance = train.load_balancing_weight * routing.balance_loss.mean()
    routing = routing._replace(balance_loss=collectives.psum(routing.balance_loss, *TOKEN_AXES))
    return loss + weight * balance, MicrobatchAux(summed_loss, weight, routing)

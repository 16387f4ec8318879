"""The compiled global step: gradients of an objective, then one update of global arrays, which the
compiler partitions. Axes as in `model/gpt.py`, A microbatches."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from rungs.config.optimization_config import OptimizationConfig
from rungs.model.feed_forward import Routing
from rungs.model.gpt import GPT
from rungs.optim.expert_balance import update_biases
from rungs.optim.skipping_optimizer import SkippingOptimizer, Update
from rungs.parallel.sharding import Layout, constrain
from rungs.step.forward import replicated
from rungs.step.gradients import summed_gradients
from rungs.step.nonfinite import ALL_FINITE, GRADIENT_NORM
from rungs.step.objective import Aux, Objective
from rungs.step.shortcuts import Shortcuts


class StepResult(NamedTuple):
    """The small arrays that a global step returns to the host."""

    losses_A: Array
    """Loss of each microbatch; in next-token training, nats of cross-entropy per counted target."""
    weights_A: Array
    """Weight of each microbatch in the loss; in next-token training, share of counted targets."""
    first_nonfinite_A: Array
    """For each microbatch, the index in `nonfinite.checked_names` of the first non-finite array,
    because of which it is left out; `nonfinite.ALL_FINITE` if there is none."""
    skipped: Array
    """Whether the update was skipped because the loss was above the limit."""
    learning_rate: Array
    gradient_norm: Array
    clipped: Array
    routing: Routing | None
    """Mixture of experts: tokens per layer and expert (counts_LE), and the load-balancing loss
    averaged over microbatches."""
    loss_scale: Array | None
    """In float16, the factor on the loss."""
    outputs_ABS: Any = ()
    """See `Aux.outputs`."""
    gradient: Any = ()
    """The mean gradient before clipping, where it is kept; see `step_function`."""

    @property
    def overflowed_A(self) -> np.ndarray:
        """Whether each microbatch was left out because gradients of the scaled loss overflowed,
        which a smaller loss scale fixes."""
        first_nonfinite_A = np.asarray(self.first_nonfinite_A)
        is_scaled = self.loss_scale is not None and self.loss_scale > 1
        return is_scaled & is_overflow(first_nonfinite_A)

    @property
    def finite_A(self) -> np.ndarray:
        """Whether each microbatch's loss and gradient, and the sum's norm, were finite."""
        return (np.asarray(self.first_nonfinite_A) == ALL_FINITE) & np.isfinite(self.gradient_norm)

    @property
    def dropped(self) -> int:
        """Number of microbatches left out for other reasons than an overflow of the scaled loss."""
        return int((~(self.finite_A | self.overflowed_A)).sum())

    @property
    def loss(self) -> float | None:
        """Mean loss per target of the microbatches that counted or overflowed; None without any."""
        return self._mean_loss(self.finite_A | self.overflowed_A)

    @property
    def trained_loss(self) -> float | None:
        """Mean loss per target of the microbatches that counted; None without any."""
        return self._mean_loss(self.finite_A)

    def _mean_loss(self, of_A: np.ndarray) -> float | None:
        weights_A = np.asarray(self.weights_A)
        of_A = of_A & (weights_A > 0)
        losses = np.asarray(self.losses_A, np.float64)[of_A]
        return float(np.average(losses, weights=weights_A[of_A])) if len(losses) else None

    def nonfinite(self, checked_names: Sequence[str]) -> dict[int, str]:
        """Return, for each microbatch that was left out other than for an overflow of the scaled
        loss, the name of its first non-finite array. `checked_names` is `nonfinite.checked_names`
        of the model."""
        is_expected_A = self.finite_A | self.overflowed_A
        return {
            number: GRADIENT_NORM if first == ALL_FINITE else checked_names[first]
            for number, first in enumerate(np.asarray(self.first_nonfinite_A).tolist())
            if not is_expected_A[number]
        }


DROPOUT = 0xD0
"""Folded into the seed, so that dropout and initial weights get different random numbers."""

Step = Callable[..., StepResult]


def make_step(
    objective: Objective,
    train: OptimizationConfig,
    mesh: Mesh | None = None,
    shortcuts: Shortcuts | None = None,
) -> Step:
    """Return a compiled function of (model, optimizer, *batch_ABS) that takes one global step,
    updating model and optimizer in place. Its optional arguments:
        loss_limit: if the loss is above it, model and optimizer stay unchanged.
        learning_rate: replaces the schedule's.

    Args:
        objective: what to minimize on each microbatch.
        mesh: the one that model and optimizer were created on; default: one device.
        shortcuts: for padded texts, some possibly without weight."""
    layout = Layout.of(train.sharding, mesh)
    step = step_function(objective, train, layout, shortcuts)
    return nnx.jit(step, donate_argnums=(0, 1))


def step_function(
    objective: Objective,
    train: OptimizationConfig,
    layout: Layout,
    shortcuts: Shortcuts | None = None,
    *,
    keeps_gradient: bool = False,
) -> Step:
    """Return the function that `make_step` compiles. With `keeps_gradient`, it returns the gradient
    as well."""

    def step(
        model: GPT,
        optimizer: SkippingOptimizer,
        *batch_ABS: Any,
        loss_limit: Array | float = jnp.inf,
        learning_rate: Array | None = None,
    ) -> StepResult:
        key, scaling = dropout_key(train, optimizer.step[...]), optimizer.loss_scale
        loss_scale = None if scaling is None else scaling.scale[...]
        count, float8 = len(batch_ABS[0]), optimizer.float8
        if float8:
            weight_amaxes_PL = float8.start(model)
        gradients = summed_gradients(
            objective, train, layout, model, optimizer.wrt, count, shortcuts
        )
        gradient_sum, aux, first_nonfinite_A = gradients(batch_ABS, key, loss_scale)
        is_finite_A = first_nonfinite_A == ALL_FINITE
        if float8:
            seen_APL2 = jnp.where(is_finite_A[:, None, None, None], aux.observed_PL2, 0)
            float8.end(model, weight_amaxes_PL, seen_APL2.max(axis=0))
        losses_A, weights_A, weight = _weigh(aux, is_finite_A)
        skipped = jnp.where(is_finite_A, aux.loss, 0).sum() > loss_limit * weight
        if scaling is not None:
            scaling.adapt(is_overflow(first_nonfinite_A).any())
        update = update_parts(
            layout, model, optimizer, gradient_sum, weight, skipped, learning_rate
        )
        routing = aux.routing
        if routing is not None and model.config.routing.balance_bias and not train.lora:
            counts_LE = jnp.where(is_finite_A[:, None, None], routing.counts_E, 0).sum(0)
            update_biases(model, counts_LE, train.balance_bias_rate, update.applied)
        gradient: Any = ()
        if keeps_gradient:  # the mean; if no microbatch is finite, the sum
            gradient = jax.tree.map(lambda g: g / jnp.where(weight > 0, weight, 1), gradient_sum)
        return StepResult(
            losses_A=losses_A,
            weights_A=weights_A,
            first_nonfinite_A=first_nonfinite_A,
            skipped=skipped,
            learning_rate=update.learning_rate,
            gradient_norm=update.gradient_norm,
            clipped=update.clipped,
            routing=routing and Routing(routing.counts_E.sum(0), routing.balance_loss.mean()),
            loss_scale=loss_scale,
            outputs_ABS=replicated(layout, aux.outputs),
            gradient=gradient,
        )

    return step


def _weigh(aux: Aux, is_finite_A: Array) -> tuple[Array, Array, Array]:
    """Return the mean loss and the weight of each microbatch, and what to divide the sum of the
    finite ones' gradients by: 1 if the objective contains its divisor already."""
    if aux.weight is not None:
        return aux.loss / aux.weight, aux.weight, jnp.where(is_finite_A, aux.weight, 0).sum()
    count, is_any_finite = len(is_finite_A), is_finite_A.any()
    return aux.loss * count, jnp.full(count, 1 / count), is_any_finite.astype(jnp.float32)


def update_parts(
    layout: Layout, model: GPT, optimizer: SkippingOptimizer, *gradient: Any
) -> Update:
    """Call `SkippingOptimizer.update`, partitioned so that each device updates its shards of
    weights and moments. Afterwards model and optimizer have their original layout."""
    constrain(layout.for_updates, model, optimizer.wrt)
    update = optimizer.update(model, *gradient)
    constrain(layout, model)
    constrain(layout.for_updates, optimizer)
    return update


def is_overflow(first_nonfinite_A: Any) -> Any:
    """Return whether the loss was finite but a gradient was not."""
    return (first_nonfinite_A > 0) & (first_nonfinite_A != ALL_FINITE)


def dropout_key(train: OptimizationConfig, step: Array | int) -> Array:
    """Return the random key for a step's dropout."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(train.seed), DROPOUT), step)

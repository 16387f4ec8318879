"""The optimizer of a run: one update per global step on the mean gradient of its finite
microbatches, with clipping, weight decay and learning rate; none if no microbatch is finite or the
loss is a spike to skip. Unlike in `optax.MultiSteps`, the inner optimizer runs once per step."""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from rungs.config.optimization_config import OptimizationConfig
from rungs.model.gpt import GPT
from rungs.model.layers import LowRankParam
from rungs.optim.optimizers import group_of, multiply_groups, update_rule
from rungs.optim.precision import DelayedScaling, LossScale, dtype_of
from rungs.optim.schedule import group_rates, learning_rate_schedule, weight_decay_schedule

WEIGHTS, UPDATES = "ema.weights.", "ema.updates"
"""Prefix of the averages' names in an optimizer's state, and the name of their number."""


class Update(NamedTuple):
    """Results of one update, all scalars."""

    learning_rate: Array
    gradient_norm: Array
    """Global norm of the mean gradient before clipping."""
    clipped: Array
    applied: Array
    """False if no microbatch was finite or the step was skipped; then nothing is updated."""


class SkippingOptimizer(nnx.Optimizer):
    """An optimizer with one update per global step of several microbatches. It trains a model's
    `nnx.Param`s or, with LoRA, only its low-rank additions. The learning rate counts all global
    steps; the moments and their bias correction count applied updates only."""

    def __init__(self, model: GPT, train: OptimizationConfig, total_steps: int) -> None:
        self.schedule = learning_rate_schedule(train, total_steps)
        self.group_rates = group_rates(train, total_steps)
        self.weight_decay = weight_decay_schedule(train, total_steps)
        self.clipping_max_norm = train.clipping_max_norm
        wrt = LowRankParam if train.lora else nnx.Param
        self.loss_scale = nnx.data(LossScale() if dtype_of(train) == jnp.float16 else None)
        self.float8 = nnx.data(DelayedScaling(model) if train.uses_float8 else None)
        decay = train.averaging_decay
        averages = None if decay is None else AveragedWeights(nnx.state(model, wrt), decay)
        self.ema = nnx.data(averages)
        super().__init__(model, _transformation(train, model, wrt), wrt=wrt)

    @jax.named_scope("optimizer")
    def update(  # type: ignore[override]
        self,
        model: nnx.Module,
        gradient_sum: Any,
        weight: Array,
        skipped: Array | bool = False,
        learning_rate: Array | None = None,
    ) -> Update:
        """Update the model in place with the gradient `gradient_sum / weight`.

        Args:
            model: the model given at construction.
            gradient_sum: sum of the finite microbatches' gradients, like the trained parameters;
                undefined if no microbatch is finite.
            weight: total weight of the finite microbatches; their number if all targets count.
            skipped: whether to leave model and moments unchanged.
            learning_rate: replaces the schedule's."""
        weight_or_1 = jnp.where(weight > 0, weight, 1)
        norm = jnp.where(weight > 0, optax.tree_utils.tree_norm(gradient_sum), 0) / weight_or_1
        limit = jnp.inf if self.clipping_max_norm is None else self.clipping_max_norm
        scale = jnp.where(norm > limit, limit / norm, 1) / weight_or_1
        applied = (weight > 0) & jnp.isfinite(norm) & ~jnp.asarray(skipped)
        if learning_rate is None:
            learning_rate = self.schedule(self.step[...])
        super().update(
            model,
            gradient_sum,
            scale=scale,
            learning_rate=learning_rate,
            group_rates=self.group_rates(self.step[...]),
            weight_decay=self.weight_decay(self.step[...]),
            applied=applied,
        )
        if self.ema is not None:
            self.ema.add(nnx.state(model, self.wrt), applied)
        return Update(learning_rate, norm, applied & (norm > limit), applied)


class AveragedWeights(nnx.Module):
    """The mean of the weights after each applied update so far, those of k updates ago with the
    weight decay^k: an exponential moving average without the bias of a start at zero, which is that
    of Adam's moments (Kingma & Ba 2015, section 3). Until the first update, the initial weights."""

    def __init__(self, weights: nnx.State, decay: float) -> None:
        self.decay = decay
        self.updates = nnx.Variable(jnp.uint32(0))
        """Updates so far."""
        self.weights = nnx.data(jax.tree.map(jnp.copy, weights))

    def add(self, weights: Any, applied: Array) -> None:
        """Take the weights after an update into the mean, unless it was not `applied`."""
        updates = self.updates[...] + applied.astype(jnp.uint32)
        # 1 − decay^n without cancellation
        log = math.log(self.decay)
        share = math.expm1(log) / jnp.expm1(jnp.maximum(updates, 1) * jnp.float32(log))
        rate = jnp.where(applied, jnp.minimum(share, 1), 0)
        means = nnx.as_pure(self.weights)
        new = jax.tree.map(
            lambda mean, now: mean + rate * (now - mean), means, nnx.as_pure(weights)
        )
        nnx.update(self.weights, new)
        self.updates.set_value(updates)


def _transformation(
    train: OptimizationConfig, model: GPT, wrt: type[nnx.Param]
) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of `train.json` with scaling, weight decay and learning rate. The places
    of the first four are part of names in checkpoints."""
    trained = nnx.state(model, wrt)
    return optax.chain(
        _by_arguments(lambda gradient, _, *, scale, **__: gradient * scale),
        update_rule(train, trained, model.config),
        _decay_weights(train, trained),
        multiply_groups(train, trained),
        _by_arguments(_step, nnx.map_state(group_of, trained)),
    )


def _step(direction: Array, param: Array, group: str, *, applied: Array, **given: Any) -> Array:
    rate = given["group_rates"].get(group, given["learning_rate"])
    # Of what isn't applied a direction may be NaN; a finite parameter stays as it is. In its place
    # XLA would keep zeros in memory.
    return jnp.where(applied, -rate, 0) * jnp.where(applied, direction, param)


def _by_arguments(
    change: Callable[..., Array], *trees: nnx.State
) -> optax.GradientTransformationExtraArgs:
    """Return a transformation that applies a function of an array, its parameter, its leaves of
    further trees and the arguments of `update`."""

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params, **arguments: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        change_one = functools.partial(change, **arguments)
        return jax.tree.map(change_one, updates, params, *trees), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _decay_weights(train: OptimizationConfig, trained: nnx.State) -> optax.GradientTransformation:
    """Return a transformation that adds weight decay to directions; if cautious, only where both
    have the same sign (Chen et al. 2025, algorithm 1)."""
    if not train.weight_decay:
        return optax.identity()
    # By the declared inputs of a matrix: a bias of stacked layers has two dimensions as well.
    everything = train.decayed_parameters == "all"
    mask = nnx.map_state(lambda _, param: everything or param.inputs > 0, trained)

    def decay(direction: Array, param: Array, *, weight_decay: Array | float, **_: Any) -> Array:
        decayed = weight_decay * param
        if train.cautious_weight_decay:
            decayed = jnp.where(direction * param >= 0, decayed, 0)
        return direction + decayed

    return optax.masked(_by_arguments(decay), mask)

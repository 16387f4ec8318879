"""The `MultiSteps` optimizer: clipping and weight decay around the rule that `train.json` names.

`MultiSteps` is told the sum of a global step's finite microbatch gradients and their weight, and
updates once on their mean. It does what `optax.MultiSteps` does, without running the inner
optimizer on every microbatch, and a microbatch that is not finite costs only itself.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from rungs.config.train_config import TrainConfig
from rungs.model.gpt import GPT
from rungs.model.layers import LowRankParam
from rungs.optim.precision import LossScale, dtype_of
from rungs.optim.schedule import learning_rate_schedule
from rungs.optim.update_rules import update_rule


class Update(NamedTuple):
    """What one update did; each a scalar."""

    learning_rate: Array
    gradient_norm: Array
    """Global norm of the mean gradient before clipping."""
    clipped: Array
    applied: Array
    """False where no microbatch was finite or the step was skipped: parameters and moments stayed
    as they were."""


class MultiSteps(nnx.Optimizer):
    """One optimizer update for each global step of several microbatches.

    The learning rate goes by the count of global steps, also of those that were not applied; the
    moments and their bias correction go by the updates that were.

    Args:
        model: its `nnx.Param`s are what is optimized or, with LoRA, its low-rank additions only.
        train: hyperparameters.
        total_steps: global steps from the first to the last, at least 1.
    """

    def __init__(self, model: GPT, train: TrainConfig, total_steps: int) -> None:
        self.schedule = learning_rate_schedule(train, total_steps)
        self.clipping_max_norm = train.clipping_max_norm
        wrt = LowRankParam if train.lora else nnx.Param
        self.loss_scale = nnx.data(LossScale() if dtype_of(train) == jnp.float16 else None)
        super().__init__(model, update_direction(train, model, wrt), wrt=wrt)

    def update(  # type: ignore[override]
        self, model: nnx.Module, gradient_sum: Any, weight: Array, skipped: Array | bool = False
    ) -> Update:
        """Update the model on `gradient_sum / weight`.

        Args:
            model: the model given at construction; changed in place.
            gradient_sum: sum of the finite microbatches' gradients, shaped as the trained
                parameters.
            weight: what those microbatches weigh together, a scalar: their number, where every
                target counts.
            skipped: whether model and moments are to stay as they are.
        """
        weight_or_1 = jnp.where(weight > 0, weight, 1)
        norm = optax.tree_utils.tree_norm(gradient_sum) / weight_or_1
        limit = jnp.inf if self.clipping_max_norm is None else self.clipping_max_norm
        scale = jnp.where(norm > limit, limit / norm, 1) / weight_or_1
        applied = (weight > 0) & jnp.isfinite(norm) & ~jnp.asarray(skipped)
        learning_rate = self.schedule(self.step[...])
        told = {"scale": scale, "learning_rate": learning_rate, "applied": applied}
        super().update(model, gradient_sum, **told)
        return Update(learning_rate, norm, applied & (norm > limit), applied)


def update_direction(
    train: TrainConfig, model: GPT, wrt: type[nnx.Param]
) -> optax.GradientTransformationExtraArgs:
    """The rule on the scaled gradient, with decoupled weight decay."""
    direction = optax.chain(
        scaled(),
        update_rule(train, nnx.state(model, wrt), model.config.width_multiplier),
        optax.add_decayed_weights(train.weight_decay, decay_mask(train, model, wrt)),
    )
    return scaled_where_applied(direction)


def scaled() -> optax.GradientTransformationExtraArgs:
    """Multiply the gradient by `scale`."""

    def update(
        gradient: optax.Updates, state: optax.OptState, _: optax.Params | None, *, scale: Array
    ) -> tuple[optax.Updates, optax.OptState]:
        return jax.tree.map(lambda g: g * scale, gradient), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def scaled_where_applied(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Scale what `inner` proposes by −learning_rate; where not `applied`, nothing changes."""

    def update(
        gradient: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        scale: Array,
        learning_rate: Array,
        applied: Array,
    ) -> tuple[optax.Updates, optax.OptState]:
        direction, moved = inner.update(gradient, state, params, scale=scale)
        change = jax.tree.map(lambda d: jnp.where(applied, -learning_rate * d, 0), direction)
        return change, jax.tree.map(lambda new, old: jnp.where(applied, new, old), moved, state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def decay_mask(train: TrainConfig, model: nnx.Module, wrt: type[nnx.Param] = nnx.Param) -> Any:
    """True for each trained parameter that weight decay acts on.

    Matrices are known by their declared axes, not by their number of dimensions: stacked layers
    give every bias a second one.
    """
    everything = train.decayed_parameters == "all"
    return jax.tree.map(
        lambda param: everything or param.inputs > 0,
        nnx.state(model, wrt),
        is_leaf=lambda node: isinstance(node, nnx.Variable),
    )

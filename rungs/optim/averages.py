"""The exponential moving average of the trained weights, for `ema_decay`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

WEIGHTS, UPDATES = "ema.weights.", "ema.updates"
"""Prefix of the averages' names in an optimizer's state, and the name of their number."""


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

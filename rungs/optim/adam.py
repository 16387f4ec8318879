"""Adam, with a barrier between its moments and the directions.

Without it XLA's CPU compiler computes the new moments twice, for themselves and for the weights,
and copies the old ones at the start of a step, because the first of these overwrites what the other
reads: 15 passes over arrays of the parameters' size instead of 10.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from rungs.optim.kept_state import keep_unless
from rungs.parallel.barriers import cpu_barrier


def scale_by_adam(
    beta1: float, beta2: float, epsilon: float
) -> optax.GradientTransformationExtraArgs:
    """Return Adam (Kingma & Ba 2015, algorithm 1), like `optax.scale_by_adam`. Its update takes
    `applied`, as in `kept_state.py`."""
    adam = optax.scale_by_adam(beta1, beta2, epsilon)

    def update(
        gradient: optax.Updates,
        state: optax.ScaleByAdamState,
        params: optax.Params | None = None,
        *,
        applied: Array,
        **_: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        _, new = adam.update(gradient, state, params)
        kept = cpu_barrier(keep_unless(applied, new, state))
        means = optax.tree.bias_correction(kept.mu, beta1, new.count)
        squares = optax.tree.bias_correction(kept.nu, beta2, new.count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), means, squares), kept

    return optax.GradientTransformationExtraArgs(adam.init, update)

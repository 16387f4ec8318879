"""State that stays as it is if an update is not applied.

Whether it is, is the argument `applied` of a rule's update. Directions are then not used.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import Array

Tree = TypeVar("Tree")


def keep_unless(applied: Array, new: Tree, old: Tree) -> Tree:
    """Return the new state if the update is applied, else the old one."""
    chosen: Tree = jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)
    return chosen


def keeping_state(rule: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return a rule that keeps its state if its update is not applied."""
    rule = optax.with_extra_args_support(rule)

    def update(
        gradient: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        *,
        applied: Array,
        **arguments: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        directions, new = rule.update(gradient, state, params, applied=applied, **arguments)
        return directions, keep_unless(applied, new, state)

    return optax.GradientTransformationExtraArgs(rule.init, update)

"""From gradients to updates: clipping, AdamW and the learning rate. Task:
`assignment/tasks/optimizer.md`."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import optax

Gradients = TypeVar("Gradients")
"""A pytree of arrays, such as the `nnx.State` that `nnx.grad` returns."""


def gradient_clipping(gradients: Gradients, max_l2_norm: float) -> Gradients:
    """Return the gradients, scaled so that the L2 norm of all of them together is at most
    `max_l2_norm`; unchanged if it is already. Their direction stays."""
    raise NotImplementedError("gradient_clipping: see assignment/tasks/optimizer.md")


def get_lr_cosine_schedule(
    it: int | jax.Array,
    max_learning_rate: float,
    min_learning_rate: float,
    warmup_iters: int,
    cosine_cycle_iters: int,
) -> Any:
    """Return the learning rate of a step: from 0 up to the maximum in a line, then down to the
    minimum in half a cosine, where it stays.

    Args:
        it: the step, from 0: a number, or a scalar array inside a compiled step.
        max_learning_rate: reached at step `warmup_iters`.
        min_learning_rate: reached at step `cosine_cycle_iters`.
        warmup_iters: 0 for no warmup.
        cosine_cycle_iters: above `warmup_iters`.
    """
    raise NotImplementedError("get_lr_cosine_schedule: see assignment/tasks/optimizer.md")


def build_optimizer_transform(
    optimizer_config: Mapping[str, Any],
    gradient_clip: float | None = None,
    lr_schedule: optax.Schedule | None = None,
) -> optax.GradientTransformation:
    """Return what turns gradients into updates: clipping, then AdamW (Loshchilov & Hutter 2019,
    https://arxiv.org/abs/1711.05101).

    Args:
        optimizer_config: `{"type": "adamw", "lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8,
            "weight_decay": 0.01}`.
        gradient_clip: largest L2 norm of all gradients together; None: any.
        lr_schedule: function from the step, from 0, to the learning rate; None: always "lr".

    Raises:
        ValueError: the type is not "adamw".
    """
    raise NotImplementedError("build_optimizer_transform: see assignment/tasks/optimizer.md")

"""The learning rate of each step, warm-up, then cosine, linear, constant or WSD; weight decay."""

from collections.abc import Callable

import optax
from jax import Array

from rungs.config.optimization_config import OptimizationConfig


def learning_rate_schedule(train: OptimizationConfig, total_steps: int) -> optax.Schedule:
    """Return a linear warm-up to the peak, then the schedule that `train.json` names: cosine or
    linear decay, a constant, or WSD ("warmup_stable_decay"; Hu et al. 2024). All but "constant"
    reach their final learning rate at step `total_steps`, one after the last."""
    peak, end = train.learning_rate, train.learning_rate * train.min_learning_rate_percent / 100
    warmup_steps = train.warmup_steps(total_steps)
    start = peak * train.start_learning_rate_percent / 100
    warmup = optax.linear_schedule(start, peak, warmup_steps)
    after = _after_warmup(train, peak, end, total_steps - warmup_steps, total_steps)
    return optax.join_schedules([warmup, after], [warmup_steps])


def group_rates(train: OptimizationConfig, total_steps: int) -> Callable[[Array], dict[str, Array]]:
    """Return a function from the step to the learning rate of each group of `group_schedules`."""
    schedules = {
        group: learning_rate_schedule(train.model_copy(update={"schedule": name}), total_steps)
        for group, name in train.group_schedules.items()
    }
    return lambda step: {group: schedule(step) for group, schedule in schedules.items()}


def weight_decay_schedule(train: OptimizationConfig, total_steps: int) -> optax.Schedule:
    """Return weight decay by step: a constant, or falling to 0 at step `total_steps`, one after the
    last."""
    match train.weight_decay_schedule:
        case "cosine":
            return optax.cosine_decay_schedule(train.weight_decay, total_steps)
        case "linear":
            return optax.linear_schedule(train.weight_decay, 0, total_steps)
        case "constant":
            return optax.constant_schedule(train.weight_decay)


def _after_warmup(
    train: OptimizationConfig, peak: float, end: float, steps: int, total_steps: int
) -> optax.Schedule:
    match train.schedule:
        case "cosine":
            return optax.cosine_decay_schedule(peak, steps, alpha=end / peak)
        case "linear":
            return optax.linear_schedule(peak, end, steps)
        case "constant":
            return optax.constant_schedule(peak)
        case "warmup_stable_decay":
            decay_steps = min(max(round(total_steps * train.decay_period_percent / 100), 1), steps)
            # Not linear_schedule's transition_begin, which wraps around with nnx's unsigned count.
            decay = optax.linear_schedule(peak, end, decay_steps)
            return optax.join_schedules(
                [optax.constant_schedule(peak), decay], [steps - decay_steps]
            )

"""The learning rate of each step: warm-up, then cosine, linear, constant or WSD."""

import optax

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

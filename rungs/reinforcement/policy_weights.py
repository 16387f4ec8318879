"""The objective: the weight of each sampled token's cross-entropy, and what its sum is divided by.

A step ascends Σ share · w(token) · log π(token), where w has no gradient:

    w = A · ρ · [not clipped] · c − β · (log π − log π_ref)

A is the completion's advantage; ρ = π ÷ π_old; c = min(π_old ÷ π_sampler, limit) if
max_sampler_ratio is set, else 1. As ∇(A · ρ) = A · ρ · ∇log π, this has the gradients of GRPO's
clipped objective (Shao et al. 2024, arXiv 2402.03300, equation 3) and its kin.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from rungs.config.reinforce_config import Aggregation, ReinforceConfig
from rungs.config.run_config import ReinforceRunConfig
from rungs.model.kernels.cross_entropy import WeightOf


class PolicyTokens(NamedTuple):
    """What the weights depend on besides the log-probability: arrays with the axes of the targets,
    float32."""

    shares: np.ndarray
    """What the token's part of the objective is multiplied by; 0 if it was not sampled."""
    advantages: np.ndarray
    old_log_probs: np.ndarray
    """Before the step's first update; read only in later ones."""
    sampler_log_probs: np.ndarray
    reference_log_probs: np.ndarray
    """Read only with a kl_coefficient."""


def weight_of(train: ReinforceConfig, is_first_update: bool) -> WeightOf:
    """Return the function for `GPT.weighted_loss` whose extras are `PolicyTokens`.

    Args:
        is_first_update: of a step. Then ρ is exactly 1, and nothing is clipped.
    """
    return functools.partial(_weight, train, is_first_update)


def has_weight(config: ReinforceRunConfig, tokens: PolicyTokens) -> Array:
    """Return whether a token has a weight, or balancing a mixture of experts has: groups of equal
    rewards have no advantages."""
    if config.train.kl_coefficient or config.model.n_experts:
        return jnp.asarray(True)
    return ((tokens.shares != 0) & (tokens.advantages != 0)).any()


def _weight(
    train: ReinforceConfig,
    is_first_update: bool,
    log_probs: Array,
    shares: Array,
    advantages: Array,
    old_log_probs: Array,
    sampler_log_probs: Array,
    reference_log_probs: Array,
) -> Array:
    old = log_probs if is_first_update else old_log_probs
    weight = advantages
    if not is_first_update:
        weight *= _ratio_weight(train, jnp.exp(log_probs - old), advantages)
    if train.max_sampler_ratio is not None:
        weight *= jnp.minimum(jnp.exp(old - sampler_log_probs), train.max_sampler_ratio)
    if train.kl_coefficient:
        weight -= train.kl_coefficient * (log_probs - reference_log_probs)
    return shares * weight


def _ratio_weight(train: ReinforceConfig, ratio: Array, advantages: Array) -> Array:
    """Return ρ, limited or 0 where the loss clips it."""
    if train.loss == "cispo":
        return jnp.minimum(ratio, train.highest_ratio)
    too_high = (advantages > 0) & (ratio > train.highest_ratio)
    too_low = (advantages < 0) & (ratio < 1 - train.clip_low)
    return jnp.where(too_high | too_low, 0, ratio)


def shares(
    aggregation: Aggregation, lengths_N: np.ndarray, counts_N: np.ndarray, max_new_tokens: int
) -> np.ndarray:
    """Return what each completion's tokens are multiplied by: float64, 0 for completions that don't
    count.

    Completions that don't count are in no denominator but that of `constant`, which depends on
    nothing that was sampled.

    Args:
        aggregation: as in `reinforce.json`.
        lengths_N: tokens of each completion, at least 1.
        counts_N: whether the completion counts.
    """
    counted = max(int(counts_N.sum()), 1)
    if aggregation == "constant":
        share_N = np.full(len(lengths_N), 1 / (len(lengths_N) * max_new_tokens))
    elif aggregation == "tokens":
        share_N = np.full(len(lengths_N), 1 / max(int(lengths_N[counts_N].sum()), 1))
    else:
        share_N = 1 / (counted * lengths_N)
    return np.where(counts_N, share_N, 0)

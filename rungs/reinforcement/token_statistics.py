"""What the log-probabilities of a step's tokens say about sampling and training."""

from typing import NamedTuple

import numpy as np

from rungs.config.reinforce_config import ReinforceConfig


class Gap(NamedTuple):
    """How far apart sampling and training are."""

    mean: float
    """Mean |Δ log-probability|, in nats."""
    largest: float
    exact: float
    """Share of tokens without any difference."""
    kl: float
    """See `kl_divergence`."""

    @classmethod
    def between(cls, sampler: np.ndarray, trainer: np.ndarray) -> "Gap":
        """Compare the float32 log-probabilities of the same tokens; at least one."""
        apart = np.abs(trainer.astype(np.float64) - sampler)
        exact = float((trainer == sampler).mean())
        return cls(float(apart.mean()), float(apart.max()), exact, kl_divergence(sampler, trainer))


def kl_divergence(sampled: np.ndarray, other: np.ndarray) -> float:
    """Return an estimate of the KL divergence, per token in nats, of another distribution from the
    one that the tokens were sampled from: the mean of exp(d) − 1 − d, which is never negative and
    unbiased (Schulman 2020, "Approximating KL divergence", k3).

    Args:
        sampled: log-probabilities of tokens under the distribution that they are from.
        other: those under the other distribution.
    """
    difference = other.astype(np.float64) - sampled
    return float(np.mean(np.expm1(difference) - difference))


def clipped_share(
    train: ReinforceConfig, old: np.ndarray, new: np.ndarray, advantages: np.ndarray
) -> float:
    """Return the share of tokens whose ratio new ÷ old the loss clips."""
    ratio = np.exp(new.astype(np.float64) - old)
    too_high = ratio > train.highest_ratio
    if train.loss == "cispo":
        return float(too_high.mean())
    too_low = ratio < 1 - train.clip_low
    return float(((advantages > 0) & too_high | (advantages < 0) & too_low).mean())

"""How much better a completion is than the others of its prompt.

Axes: P prompts, G completions of each.
"""

from typing import NamedTuple

import numpy as np

from rungs.config.reinforce_config import Advantage

_EPSILON = 1e-4
"""Added to the standard deviation, as in TRL's GRPOTrainer."""


def advantages(rewards_PG: np.ndarray, counts_PG: np.ndarray, kind: Advantage) -> np.ndarray:
    """Return the advantage of each completion: float64, 0 in groups of equal rewards.

    `leave_one_out` times the completion's log-probability gradient is an unbiased estimate of the
    policy gradient; `mean` is (G − 1) ÷ G of it; `mean_std` is biased (Liu et al. 2025,
    arXiv 2503.20783, section 3.1).

    Args:
        rewards_PG: of each completion; anything where it does not count.
        counts_PG: whether the completion counts. One that does not has advantage 0, and no
            influence on the others.
        kind: as `advantage` in `reinforce.json`.
    """
    rewards_PG = np.where(counts_PG, rewards_PG, 0).astype(np.float64)
    counted_P1 = counts_PG.sum(axis=1, keepdims=True)
    mean_P1 = rewards_PG.sum(axis=1, keepdims=True) / np.maximum(counted_P1, 1)
    centred_PG = np.where(counts_PG, rewards_PG - mean_P1, 0)
    if kind == "leave_one_out":
        centred_PG *= counted_P1 / np.maximum(counted_P1 - 1, 1)
    if kind == "mean_std":
        variance_P1 = (centred_PG**2).sum(axis=1, keepdims=True) / np.maximum(counted_P1 - 1, 1)
        centred_PG /= np.sqrt(variance_P1) + _EPSILON
    return np.where(equal_groups(rewards_PG, counts_PG)[:, None], 0, centred_PG)


def equal_groups(rewards_PG: np.ndarray, counts_PG: np.ndarray) -> np.ndarray:
    """Return for each group whether its completions that count have the same reward. A standard
    deviation would not do: that of equal numbers can be above 0 by rounding."""
    highest_P = np.where(counts_PG, rewards_PG, -np.inf).max(axis=1)
    lowest_P = np.where(counts_PG, rewards_PG, np.inf).min(axis=1)
    return highest_P <= lowest_P


class GroupCounts(NamedTuple):
    """How many groups are all wrong, mixed or all right."""

    wrong: int
    mixed: int
    right: int

    @classmethod
    def of(cls, correct_PG: np.ndarray) -> "GroupCounts":
        """Count groups by whether their completions are correct."""
        right, any_right = correct_PG.all(axis=1), correct_PG.any(axis=1)
        return cls(int((~any_right).sum()), int((any_right & ~right).sum()), int(right.sum()))

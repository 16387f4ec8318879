"""Advantages against plain definitions in float64."""

import statistics

import numpy as np
import pytest

from rungs.config.reinforce_config import Advantage
from rungs.objectives.policy import advantages, equal_groups
from rungs.reinforcement.policy_update import group_counts


def plain(rewards: list[float], kind: Advantage) -> list[float]:
    mean = statistics.fmean(rewards)
    if kind == "leave_one_out":
        others = [[r for j, r in enumerate(rewards) if j != i] for i in range(len(rewards))]
        return [reward - statistics.fmean(o) for reward, o in zip(rewards, others, strict=True)]
    scale = statistics.stdev(rewards) + 1e-4 if kind == "mean_std" else 1
    return [(reward - mean) / scale for reward in rewards]


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
def test_each_group_is_compared_with_itself(kind: Advantage) -> None:
    rewards = np.random.default_rng(0).normal(size=(5, 4)) + 10
    found = advantages(rewards, np.ones((5, 4), bool), kind)
    expected = [plain(group, kind) for group in rewards.tolist()]
    np.testing.assert_allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
def test_what_does_not_count_changes_nothing(kind: Advantage) -> None:
    rewards = np.array([[1.0, np.nan, 0.0, 0.5], [np.nan, np.nan, 3.0, np.nan], [np.nan] * 4])
    counts = np.isfinite(rewards)
    found = advantages(rewards, counts, kind)
    np.testing.assert_allclose(found[0, [0, 2, 3]], plain([1.0, 0.0, 0.5], kind), rtol=1e-12)
    assert found[0, 1] == 0
    assert not found[1:].any()


@pytest.mark.parametrize("kind", ["mean", "mean_std", "leave_one_out"])
def test_equal_rewards_have_no_advantage_even_if_their_mean_is_rounded(kind: Advantage) -> None:
    rewards = np.full((1, 3), 0.1)
    assert (rewards - rewards.mean()).any()
    assert not advantages(rewards, np.ones((1, 3), bool), kind).any()


def test_groups_are_counted() -> None:
    correct = np.array([[1, 1], [0, 1], [0, 0], [0, 0]], bool)
    assert group_counts(correct) == {"groups_wrong": 2, "groups_mixed": 1, "groups_right": 1}
    rewards = np.array([[1, 1], [0, 1], [0.5, 0.5], [0.2, np.nan]])
    assert equal_groups(rewards, np.isfinite(rewards)).tolist() == [True, False, True, True]

"""Advantages, weights of tokens and statistics against plain definitions in float64; pass@k against
all subsets, and its interval against simulation."""

import itertools
import statistics
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rungs.config.reinforce_config import Advantage, Aggregation, PolicyLoss, ReinforceConfig
from rungs.objectives.policy import advantages, equal_groups, shares, token_weight
from rungs.reinforcement.policy_update import (
    clipped_share,
    group_counts,
    kl_divergence,
    log_prob_gaps,
    mean_pass_at_k,
)
from rungs.run.records import wilson_interval


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


LOG_PROBS = np.log(np.array([0.5, 0.5, 0.5, 0.5, 0.5, 0.5], np.float32))
RATIOS = np.array([1.5, 1.1, 0.5, 1.5, 0.9, 0.5], np.float32)
OLD = LOG_PROBS - np.log(RATIOS)
ADVANTAGES = np.array([1, 1, 1, -1, -1, -1], np.float32)
SHARES = np.array([0.5, 1, 1, 1, 1, 1], np.float32)


def weights(
    *, first: bool = False, sampler: np.ndarray = OLD, reference: np.ndarray = OLD, **keys: object
) -> np.ndarray:
    settings: dict[str, Any] = {"clip_low": 0.2, "clip_high": None} | keys
    train = ReinforceConfig.model_construct(**settings)
    arrays = map(jnp.asarray, (LOG_PROBS, SHARES, ADVANTAGES, OLD, sampler, reference))
    return np.asarray(token_weight(train, first, *arrays))


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "cispo", "gspo"])
def test_the_first_update_weights_by_the_advantage(loss: PolicyLoss) -> None:
    np.testing.assert_array_equal(weights(first=True, loss=loss), SHARES * ADVANTAGES)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("grpo", [0, 1.1, 0.5, -1.5, -0.9, 0]),
        ("dr_grpo", [0, 1.1, 0.5, -1.5, -0.9, 0]),
        ("dapo", [0, 1.1, 0.5, -1.5, -0.9, 0]),
        ("cispo", [1.28, 1.1, 0.5, -1.28, -0.9, -0.5]),
    ],
)
def test_later_updates_clip_in_the_direction_of_the_advantage(
    loss: PolicyLoss, expected: list[float]
) -> None:
    np.testing.assert_allclose(weights(loss=loss), SHARES * expected, rtol=1e-6)


def test_the_range_has_two_sides() -> None:
    wide = weights(loss="grpo", clip_low=0.6, clip_high=0.6)
    np.testing.assert_allclose(wide, SHARES * ADVANTAGES * RATIOS, rtol=1e-6)
    assert np.flatnonzero(weights(loss="dapo", clip_high=0.05) == 0).tolist() == [0, 1, 5]


def test_the_sampler_ratio_is_truncated() -> None:
    sampler = OLD - np.log(np.array([3, 1, 0.5, 3, 1, 0.5], np.float32))
    found = weights(loss="cispo", sampler=sampler, max_sampler_ratio=2.0)
    expected = weights(loss="cispo") * np.array([2, 1, 0.5, 2, 1, 0.5])
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    current = LOG_PROBS - np.log(np.array([3, 1, 0.5, 3, 1, 0.5], np.float32))
    first = weights(first=True, loss="grpo", sampler=current, max_sampler_ratio=2.0)
    np.testing.assert_allclose(first, SHARES * ADVANTAGES * [2, 1, 0.5, 2, 1, 0.5], rtol=1e-6)


def test_the_kl_term_pulls_to_the_reference() -> None:
    reference = LOG_PROBS - np.float32(0.25)
    found = weights(first=True, loss="grpo", kl_coefficient=2.0, reference=reference)
    np.testing.assert_allclose(found, SHARES * (ADVANTAGES - 0.5), rtol=1e-6)


LENGTHS, COUNTS = np.array([4, 2, 6, 8]), np.array([True, True, False, True])


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("constant", [1 / 40, 1 / 40, 0, 1 / 40]),
        ("tokens", [1 / 14, 1 / 14, 0, 1 / 14]),
        ("sequences", [1 / 12, 1 / 6, 0, 1 / 24]),
    ],
)
def test_shares_add_up(aggregation: Aggregation, expected: list[float]) -> None:
    found = shares(aggregation, LENGTHS, COUNTS, max_new_tokens=10)
    np.testing.assert_allclose(found, expected, rtol=1e-15)
    if aggregation != "constant":
        np.testing.assert_allclose((found * LENGTHS).sum(), 1)


@pytest.mark.parametrize("aggregation", ["constant", "tokens", "sequences"])
def test_nothing_counts(aggregation: Aggregation) -> None:
    assert not shares(aggregation, LENGTHS, np.zeros(4, bool), 10).any()


def test_the_estimate_of_the_kl_divergence_is_unbiased() -> None:
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    exact = (p * np.log(p / q)).sum()
    estimates = [kl_divergence(np.log(p[[i]]), np.log(q[[i]])) for i in range(3)]
    assert (p * estimates).sum() == pytest.approx(exact, rel=1e-12)
    assert min(estimates) >= 0


def test_the_gap_between_sampling_and_training() -> None:
    sampler = np.array([-1.0, -2.0, -3.0, -4.0], np.float32)
    gaps = log_prob_gaps(sampler, sampler + np.array([0, 0.5, 0, -0.25], np.float32))
    *sizes, kl = gaps.values()
    assert [*gaps][:3] == ["log_prob_gap", "largest_log_prob_gap", "exact_ratios"]
    assert sizes == [0.1875, 0.5, 0.5]
    assert kl == pytest.approx((np.expm1(0.5) - 0.5 + np.expm1(-0.25) + 0.25) / 4)


@pytest.mark.parametrize(("loss", "expected"), [("grpo", 0.5), ("cispo", 0.5), ("dapo", 0.25)])
def test_the_share_of_clipped_tokens(loss: str, expected: float) -> None:
    train = ReinforceConfig.model_construct(loss=loss, clip_low=0.2, clip_high=None)
    new = np.log(np.array([[1.25, 1.5, 0.5, 0.9, 9]]))
    advantages = np.array([[1, -1, -1, 1, 1] if loss != "dapo" else [1, 1, 1, 1, 1]])
    is_sampled = np.array([[True] * 4 + [False]])
    share = clipped_share(train, np.zeros((1, 5)), new, advantages, is_sampled)
    assert share == (expected if loss != "cispo" else 0.25)


def test_gspo_clips_whole_completions() -> None:
    train = ReinforceConfig.model_construct(loss="gspo", clip_low=0.1, clip_high=0.1)
    new = np.log(np.array([[2.0, 0.5, 1.0], [1.5, 1.5, 99]]))
    is_sampled = np.array([[True, True, True], [True, True, False]])
    assert clipped_share(train, 0 * new, new, np.ones_like(new), is_sampled) == 2 / 5


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(k: int) -> None:
    correct = np.random.default_rng(k).random((20, 5)) < 0.3
    subsets = list(itertools.combinations(range(5), k))
    expected = np.mean([[row[list(subset)].any() for subset in subsets] for row in correct])
    assert mean_pass_at_k(correct, k) == pytest.approx(expected, abs=1e-12)


def test_too_few_completions_are_refused() -> None:
    with pytest.raises(ValueError, match="pass@4 needs at least 4 completions"):
        mean_pass_at_k(np.ones((2, 3), bool), 4)


@pytest.mark.parametrize(("samples", "least", "most"), [(1, 0.93, 0.97), (8, 0.95, 1.0)])
@pytest.mark.parametrize("mean", [0.1, 0.5, 0.95])
def test_the_interval_covers_the_mean_at_least_95_percent(
    samples: int, least: float, most: float, mean: float
) -> None:
    """One completion of each item gives yes or no; several, numbers that vary less."""
    rng, items = np.random.default_rng(0), 256
    rates = rng.beta(2 * mean, 2 * (1 - mean), (2000, items))
    found = rng.binomial(samples, rates).mean(axis=1) / samples
    intervals = np.array([wilson_interval(one, items) for one in found])
    covered = ((intervals[:, 0] <= mean) & (mean <= intervals[:, 1])).mean()
    assert least <= covered <= most


def test_the_interval_is_never_a_point() -> None:
    assert wilson_interval(1.0, 256) == (pytest.approx(0.98522, abs=1e-5), 1.0)
    assert wilson_interval(0.0, 256) == (0.0, pytest.approx(0.01478, abs=1e-5))

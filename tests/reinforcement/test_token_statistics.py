"""Statistics of log-probabilities against exact values."""

import numpy as np
import pytest

from rungs.config.reinforce_config import ReinforceConfig
from rungs.reinforcement.policy_update import clipped_share, kl_divergence, log_prob_gaps


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
    new = np.log(np.array([1.25, 1.5, 0.5, 0.9]))
    advantages = np.array([1, -1, -1, 1]) if loss != "dapo" else np.array([1, 1, 1, 1])
    share = clipped_share(train, np.zeros(4), new, advantages)
    assert share == (expected if loss != "cispo" else 0.25)

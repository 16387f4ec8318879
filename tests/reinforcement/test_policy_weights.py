"""The weights of tokens, and what their sum is divided by."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rungs.config.reinforce_config import Aggregation, PolicyLoss, ReinforceConfig
from rungs.objectives.policy import shares, token_weight

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


@pytest.mark.parametrize("loss", ["grpo", "dr_grpo", "dapo", "cispo"])
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

"""pass@k against all subsets, and its interval against simulation."""

import itertools

import numpy as np
import pytest

from rungs.reinforcement.policy_update import mean_pass_at_k
from rungs.run.records import wilson_interval


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

"""Verdicts on simulated experiments, whose truth is known, and beside SciPy's t test."""

import math

import numpy as np
import pytest
from scipy import stats

from rungs.experiments import verdict
from rungs.experiments.verdict import AnyNumber, FixedNumber, Judgement, verdicts

EXPERIMENTS = 2000
DECIDED = {Judgement.BETTER, Judgement.WORSE}


def judged(differences: dict[str, np.ndarray], effect: float | None = None) -> dict[str, Judgement]:
    found = verdicts(differences, FixedNumber(), True, effect)
    return {name: one.judgement for name, one in found.items()}


def first_verdict(differences: np.ndarray, first: int, to: int) -> tuple[Judgement, int]:
    """Return the verdict of an experiment that looks after each seed, and its seeds."""
    for n in range(first, to + 1):
        found = verdicts({"a": differences[:n]}, AnyNumber(), True, None)["a"]
        if found.is_decided:
            return found.judgement, n
    return Judgement.UNDECIDED, to


def test_a_single_variant_has_the_t_test_of_scipy() -> None:
    differences = np.array([-0.02, -0.035, -0.011, -0.03])
    found = verdicts({"a": differences}, FixedNumber(), True, None)["a"]
    expected = stats.ttest_1samp(differences, 0)
    assert found.p == pytest.approx(expected.pvalue)
    assert found.interval == pytest.approx(expected.confidence_interval(0.95))
    assert found.judgement is Judgement.BETTER
    assert (
        verdicts({"a": differences}, FixedNumber(), False, None)["a"].judgement is Judgement.WORSE
    )


@pytest.mark.parametrize("variants", [1, 8])
def test_without_an_effect_few_experiments_of_a_fixed_size_have_a_verdict(variants: int) -> None:
    random = np.random.default_rng(variants)
    false = sum(
        bool(DECIDED & set(judged({f"{v}": d for v, d in enumerate(drawn)}).values()))
        for drawn in random.normal(size=(EXPERIMENTS, variants, 3))
    )
    # the binomial's 99.9% quantile at 5%, so that a right formula fails once in a thousand
    assert false <= stats.binom.ppf(0.999, EXPERIMENTS, verdict.ALPHA)
    assert false >= EXPERIMENTS * 0.02  # nor is it so careful that it finds nothing


def test_without_an_effect_few_experiments_that_look_after_each_seed_have_a_verdict() -> None:
    drawn = np.random.default_rng(0).normal(size=(EXPERIMENTS, 12))
    false = sum(first_verdict(one, 3, 12)[0] in DECIDED for one in drawn)
    assert false <= stats.binom.ppf(0.999, EXPERIMENTS, verdict.ALPHA)
    plain = sum(
        any(stats.ttest_1samp(one[:n], 0).pvalue < verdict.ALPHA for n in range(3, 13))
        for one in drawn[:200]
    )
    assert plain > 0.12 * 200  # what looking does to a plain t test


@pytest.mark.parametrize(("effect", "share", "most_seeds"), [(2, 0.95, 7.0), (4, 0.99, 4.5)])
def test_effects_are_found_with_few_seeds(effect: float, share: float, most_seeds: float) -> None:
    drawn = np.random.default_rng(1).normal(effect, size=(500, 12))
    found = [first_verdict(one, 3, 12) for one in drawn]
    assert np.mean([judgement is Judgement.WORSE for judgement, _ in found]) >= share
    assert np.mean([seeds for _, seeds in found]) <= most_seeds


def test_the_thresholds_are_those_of_the_formula() -> None:
    """Wang and Ramdas 2023, arXiv 2310.03722, with g = 9."""
    found = [AnyNumber().threshold(n, 0.05) for n in (3, 4, 5, 6, 8, 10, 12)]
    assert found == pytest.approx([14.6, 6.6, 5.4, 4.9, 4.4, 4.2, 4.0], abs=0.06)
    assert AnyNumber().threshold(2, 0.05) == math.inf


@pytest.mark.parametrize("sampling", [FixedNumber(), AnyNumber()])
@pytest.mark.parametrize("n", [4, 7, 40])
def test_p_values_and_thresholds_agree(sampling: verdict.Sampling, n: int) -> None:
    for alpha in (0.05, 0.01):
        assert sampling.p_value(sampling.threshold(n, alpha), n) == pytest.approx(alpha)


def test_holm_tests_the_smallest_p_hardest() -> None:
    random = np.random.default_rng(2)
    differences = {f"{v}": random.normal(0.7 * v, size=5) for v in range(5)}
    p = {name: stats.ttest_1samp(one, 0).pvalue for name, one in differences.items()}
    rejected, ordered = set(), sorted(p, key=lambda name: p[name])
    for at, name in enumerate(ordered):
        if p[name] > 0.05 / (len(p) - at):
            break
        rejected.add(name)
    found = verdicts(differences, FixedNumber(), True, None)
    assert 0 < len(rejected) < 5
    assert {name for name, one in found.items() if one.judgement in DECIDED} == rejected


def test_a_difference_that_is_surely_small_is_none() -> None:
    close, wide = np.array([0.001, -0.001, 0.0005]), np.array([0.1, -0.1, 0.05])
    assert judged({"a": close}, effect=0.01)["a"] is Judgement.SAME
    assert judged({"a": wide}, effect=0.01)["a"] is Judgement.UNDECIDED
    assert judged({"a": close})["a"] is Judgement.UNDECIDED
    assert judged({"a": np.zeros(3)})["a"] is Judgement.SAME
    assert judged({"a": np.zeros(1)})["a"] is Judgement.FAILED


def test_the_seeds_that_an_undecided_variant_needs_are_enough() -> None:
    differences = np.array([0.5, 2.5, -0.2])
    found = verdicts({"a": differences}, FixedNumber(), True, None)["a"]
    assert found.judgement is Judgement.UNDECIDED
    needed = found.seeds_needed
    assert needed is not None

    def half(n: int) -> float:
        return float(stats.t.ppf(0.975, n - 1) * found.deviation / math.sqrt(n))

    assert half(needed) < found.difference <= half(needed - 1)


def test_after_one_that_is_not_significant_none_is() -> None:
    """p-values of 0.03 and 0.04: Holm tests the first at 0.025, and then the second, too."""
    t = {"a": stats.t.isf(0.015, 9), "b": stats.t.isf(0.02, 9)}
    shape = np.array([-1, 1] * 5) / np.std([-1, 1] * 5, ddof=1) * math.sqrt(10)
    found = judged({name: shape + each for name, each in t.items()})
    assert set(found.values()) == {Judgement.UNDECIDED}
    assert judged({"a": shape + t["a"]})["a"] is Judgement.WORSE


def test_the_interval_of_a_mean_is_students() -> None:
    values = [3.1, 3.4, 3.2]
    low, high = stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert verdict.mean_interval(values) == pytest.approx((high - low) / 2)
    assert math.isnan(verdict.mean_interval([3.1]))

"""Is a variant better than its base? Differences paired by seed, their intervals, and verdicts.

Holm's correction (1979) keeps the probability of any false verdict in an experiment at `ALPHA` or
less, however many variants it compares."""

import bisect
import enum
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from scipy import special

from rungs.run.step_table import FloatArray

Values = Sequence[float] | FloatArray
ALPHA = 0.05
"""Probability of a false verdict, per experiment."""
MIXTURE = 9
"""g of `AnyNumber`: how large an effect is expected, as its variance over that of the differences.
In simulations it hardly matters between 4 and 25."""
MOST_SEEDS = 1000
"""The largest number of seeds that is worth naming."""


class Sampling(Protocol):
    """How many seeds there are, which decides what a t statistic means. `n` is the number of
    differences, at least 2."""

    def threshold(self, n: int, alpha: float) -> float:
        """Return the smallest |t| that is significant."""
        ...

    def p_value(self, t: float, n: int) -> float:
        """Return the smallest alpha at which |t| is significant."""
        ...


class FixedNumber:
    """The number of seeds was decided before the first run: Student's t."""

    def threshold(self, n: int, alpha: float) -> float:
        return float(special.stdtrit(n - 1, 1 - alpha / 2))

    def p_value(self, t: float, n: int) -> float:
        return float(2 * special.stdtr(n - 1, -abs(t)))


class AnyNumber:
    """Seeds are added until there is a verdict, so a test must hold at every look: the t test of a
    Gaussian mixture over effects with a right-Haar prior on the deviation (Lai 1976; Wang and
    Ramdas 2023, arXiv 2310.03722). With a plain t test, one in five experiments without an effect
    would end with a verdict."""

    def threshold(self, n: int, alpha: float) -> float:
        r, freedom = 1 + n * MIXTURE, n - 1
        c = (math.sqrt(r) / alpha) ** (2 / n)
        return math.inf if c >= r else math.sqrt(freedom * (c - 1) / (1 - c / r))

    def p_value(self, t: float, n: int) -> float:
        r, freedom = 1 + n * MIXTURE, n - 1
        c = r if math.isinf(t) else (freedom + t * t) / (freedom + t * t / r)
        return min(1.0, math.sqrt(r) * c ** (-n / 2))


class Judgement(enum.StrEnum):
    """What the interval of a difference says."""

    BETTER = "better"
    """The interval leaves out 0."""
    WORSE = "worse"
    """Likewise, on the other side."""
    SAME = "no different"
    """The interval lies within ± the smallest effect that matters."""
    UNDECIDED = "undecided"
    FAILED = "failed"
    """Runs of fewer than two seeds have a result."""


class Verdict(NamedTuple):
    """What an experiment says of a variant."""

    judgement: Judgement
    seeds: int
    """Pairs of runs."""
    difference: float = math.nan
    """Mean of variant − base."""
    half_width: float = math.nan
    """Half of the interval of the mean, at the variant's corrected level."""
    deviation: float = math.nan
    """Standard deviation of the differences."""
    p: float = math.nan
    """Before Holm's correction."""
    seeds_needed: int | None = None
    """Of an undecided variant: the number of seeds that would be likely to tell, if mean and
    deviation stay; None if that is more than `MOST_SEEDS`."""

    @property
    def is_decided(self) -> bool:
        return self.judgement is not Judgement.UNDECIDED

    @property
    def interval(self) -> tuple[float, float]:
        return self.difference - self.half_width, self.difference + self.half_width


def verdicts(
    differences: Mapping[str, Values],
    sampling: Sampling,
    lower_is_better: bool,
    smallest_effect: float | None,
    alpha: float = ALPHA,
) -> dict[str, Verdict]:
    """Return the verdict on each variant, from its differences from its base by seed."""
    enough = {name: found for name, found in differences.items() if len(found) >= 2}
    levels = _holm(
        {name: sampling.p_value(_t(found), len(found)) for name, found in enough.items()}, alpha
    )
    return {
        name: _verdict(enough[name], sampling, lower_is_better, smallest_effect, levels[name])
        if name in enough
        else Verdict(Judgement.FAILED, len(found))
        for name, found in differences.items()
    }


def half_width(deviation: float, n: int, sampling: Sampling, alpha: float) -> float:
    """Return half the width of the interval of a mean of `n` values with a standard deviation: also
    the smallest effect that so many can show."""
    threshold = sampling.threshold(n, alpha)
    return threshold if math.isinf(threshold) else threshold * deviation / math.sqrt(n)


def mean_interval(values: Sequence[float], alpha: float = ALPHA) -> float:
    """Return half the width of Student's interval of a mean; NaN for a single value."""
    if len(values) < 2:
        return math.nan
    return half_width(float(np.std(values, ddof=1)), len(values), FixedNumber(), alpha)


def _holm(p: Mapping[str, float], alpha: float) -> dict[str, float]:
    """Return the level at which each p-value is tested: the smallest at alpha ÷ m, the next at
    alpha ÷ (m − 1), until one is not significant; the rest at that one's level."""
    levels: dict[str, float] = {}
    left, goes_on = len(p), True
    for name in sorted(p, key=lambda name: p[name]):
        levels[name] = alpha / left
        goes_on = goes_on and p[name] <= levels[name]
        left -= goes_on
    return levels


def _t(differences: Values) -> float:
    mean, deviation = float(np.mean(differences)), float(np.std(differences, ddof=1))
    if deviation == 0:
        return math.inf if mean else 0.0
    return mean / (deviation / math.sqrt(len(differences)))


def _verdict(
    differences: Values,
    sampling: Sampling,
    lower_is_better: bool,
    smallest_effect: float | None,
    alpha: float,
) -> Verdict:
    n, mean = len(differences), float(np.mean(differences))
    deviation = float(np.std(differences, ddof=1))
    half, p = half_width(deviation, n, sampling, alpha), sampling.p_value(_t(differences), n)
    found = _judge(mean, half, lower_is_better, smallest_effect)
    needed = None
    if found is Judgement.UNDECIDED:
        needed = _seeds_needed(mean, deviation, n, sampling, smallest_effect, alpha)
    return Verdict(found, n, mean, half, deviation, p, needed)


def _judge(
    mean: float, half: float, lower_is_better: bool, smallest_effect: float | None
) -> Judgement:
    if abs(mean) > half:
        return Judgement.BETTER if (mean < 0) == lower_is_better else Judgement.WORSE
    is_small = abs(mean) + half <= (smallest_effect or 0)  # also if all differences are 0
    return Judgement.SAME if is_small else Judgement.UNDECIDED


def _seeds_needed(
    mean: float,
    deviation: float,
    n: int,
    sampling: Sampling,
    smallest_effect: float | None,
    alpha: float,
) -> int | None:
    def tells(seeds: int) -> bool:
        half = half_width(deviation, seeds, sampling, alpha)
        return _judge(mean, half, True, smallest_effect) is not Judgement.UNDECIDED

    numbers = range(n + 1, MOST_SEEDS + 1)  # intervals shrink with the number
    at = bisect.bisect_left(numbers, True, key=tells)
    return numbers[at] if at < len(numbers) else None

"""A power law of loss against compute through several runs, and how sure it is.

L(C) = a · C^-b (Kaplan et al. 2020, section 1.2, equation 1.3) is a straight line in logarithms:
with x = log C and y = log L, least squares of y on x. Its intervals are those of a straight line
(Draper & Smith 1998, chapters 1 and 3), for runs that scatter around it by the same percentage
wherever they are, each by itself.

Where the loss has a floor, as in L = E + A · N^-α + B · D^-β (Hoffmann et al. 2022, section 3.3),
the points bend away from every straight line; the term in x² shows it.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from rungs.run.recorded_run import FloatArray

CONFIDENCE = 0.95
LEAST_RUNS = 3
"""Of different compute: through two points every line is perfect."""
LEAST_SPAN = 2
"""Of compute, largest to smallest."""
LEAST_RUNS_TO_BEND = 5


class Estimate(NamedTuple):
    """A number with its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, standard_error: float, freedom: int) -> "Estimate":
        """By Student's t: with one degree of freedom 12.7 standard errors, with many 1.96."""
        reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * standard_error
        return cls(value, value - reach, value + reach)

    @property
    def may_be_zero(self) -> bool:
        """Whether the interval has 0 in it."""
        return self.low <= 0 <= self.high


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """What `fit` has found."""

    exponent: Estimate
    """b, positive where loss falls with compute: b ± t · s ÷ √Σ(x − x̄)²."""
    deviation: float
    """s, the residual standard deviation of log L, with n − 2 degrees of freedom."""
    curvature: Estimate | None
    """Of the term in x², with n − 3 degrees of freedom; None below five runs."""
    runs: int
    """n."""
    centre: tuple[float, float]
    """x̄ and ȳ, which the line goes through."""
    spread: float
    """Σ(x − x̄)²."""

    @property
    def coefficient(self) -> float:
        """a, the loss at one FLOP: far outside what was measured, but it completes the formula."""
        return _exp(self.centre[1] + self.exponent.value * self.centre[0])

    @property
    def scatter_percent(self) -> float:
        """One residual standard deviation, as a share of the loss."""
        return 100 * (_exp(self.deviation) - 1)

    @property
    def bends(self) -> bool:
        """Whether the term in x² is not 0, so that a straight line is not the law. Of straight
        points one set in twenty seems to."""
        return self.curvature is not None and not self.curvature.may_be_zero

    def predict(self, compute: float) -> Estimate:
        """The loss of a new run of so many FLOPs, if the line holds there; the interval is that
        of one more run: t · s · √(1 + 1 ÷ n + (x − x̄)² ÷ Σ(x − x̄)²), in logarithms."""
        from_centre = np.log(compute) - self.centre[0]
        log_loss = self.centre[1] - self.exponent.value * from_centre
        error = self.deviation * np.sqrt(1 + 1 / self.runs + from_centre**2 / self.spread)
        return Estimate(*map(_exp, Estimate.around(log_loss, error, self.runs - 2)))


def fit(compute: ArrayLike, loss: ArrayLike) -> PowerLaw:
    """The power law through runs of so many FLOPs that ended at these losses, all above 0.

    Raises:
        ValueError: they are too few, or too close together.
    """
    x, y = np.log(compute), np.log(loss)
    if (different := len(set(x.tolist()))) < LEAST_RUNS:
        raise ValueError(
            f"different amounts of compute: {different}; a power law takes {LEAST_RUNS} or more"
        )
    if (span := np.max(compute) / np.min(compute)) < LEAST_SPAN:
        raise ValueError(
            f"the largest compute is {span:.3g} times the smallest; a power law takes"
            f" {LEAST_SPAN} or more"
        )
    runs, from_centre = len(x), x - x.mean()
    spread = float(from_centre @ from_centre)
    slope = float(from_centre @ y) / spread
    residuals = y - y.mean() - slope * from_centre
    deviation = float(np.sqrt(residuals @ residuals / (runs - 2)))
    return PowerLaw(
        exponent=Estimate.around(-slope, deviation / spread**0.5, runs - 2),
        deviation=deviation,
        curvature=_curvature(from_centre, residuals) if runs >= LEAST_RUNS_TO_BEND else None,
        runs=runs,
        centre=(float(x.mean()), float(y.mean())),
        spread=spread,
    )


def _curvature(from_centre: FloatArray, residuals: FloatArray) -> Estimate:
    """The coefficient of x² in a parabola: the slope of the line's residuals on what the line
    leaves of x² (Frisch & Waugh 1933)."""
    bow = from_centre**2
    bow = bow - bow.mean() - from_centre * (from_centre @ bow) / (from_centre @ from_centre)
    value = float(bow @ residuals / (bow @ bow))
    left, freedom = residuals - value * bow, len(bow) - 3
    return Estimate.around(value, float(np.sqrt(left @ left / freedom / (bow @ bow))), freedom)


def _exp(logarithm: float) -> float:
    """Infinite where it is too large: an interval of few runs may be."""
    with np.errstate(over="ignore"):
        return float(np.exp(logarithm))

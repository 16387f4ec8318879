"""A power law of loss against compute, fitted to several runs, with its intervals.

L(C) = a · C^-b (Kaplan et al. 2020, section 1.2, equation 1.3) is a straight line in logarithms:
with x = log C and y = log L, least squares of y on x. The intervals are those of a straight line
(Draper & Smith 1998, chapters 1 and 3). They assume that runs scatter around it independently and
by the same percentage everywhere.

If the loss has a floor, as in L = E + A · N^-α + B · D^-β (Hoffmann et al. 2022, section 3.3), the
points bend away from every straight line. The coefficient of x² shows it.
"""

import dataclasses
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from rungs.run.recorded_run import FloatArray

CONFIDENCE = 0.95
MIN_RUNS = 3
"""Of different compute: any line fits two points."""
MIN_SPAN = 2
"""Ratio of the largest to the smallest compute."""
MIN_RUNS_FOR_CURVATURE = 5


class Estimate(NamedTuple):
    """A number with its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, standard_error: float, freedom: int) -> "Estimate":
        """Return a value with its interval by Student's t: with one degree of freedom 12.7 standard
        errors, with many 1.96."""
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * standard_error
        return cls(value, value - half, value + half)

    @property
    def may_be_zero(self) -> bool:
        """Whether the interval contains 0."""
        return self.low <= 0 <= self.high

    def __str__(self) -> str:
        """Return the value ± half the interval, to two significant digits of that."""
        half = self.high - self.value
        digits = next((n for n in range(2, 7) if half >= 10 ** (1 - n)), 7)
        return f"{self.value:.{digits}f} ± {half:.{digits}f}"


@dataclasses.dataclass(frozen=True)
class PowerLaw:
    """A fitted power law."""

    exponent: Estimate
    """b, positive if loss falls with compute: b ± t · s ÷ √Σ(x − x̄)²."""
    deviation: float
    """s, the residual standard deviation of log L, with n − 2 degrees of freedom."""
    curvature: Estimate | None
    """Coefficient of x², with n − 3 degrees of freedom; None below five runs."""
    runs: int
    """n."""
    centre: tuple[float, float]
    """x̄ and ȳ, which the line goes through."""
    spread: float
    """Σ(x − x̄)²."""

    @property
    def coefficient(self) -> float:
        """a, the loss at one FLOP: far outside the measurements, but it completes the formula."""
        return _exp(self.centre[1] + self.exponent.value * self.centre[0])

    @property
    def scatter_percent(self) -> float:
        """One residual standard deviation, in percent of the loss."""
        return 100 * (_exp(self.deviation) - 1)

    @property
    def bends(self) -> bool:
        """Whether the coefficient of x² is significant, so that a straight line is not the law. One
        in twenty sets of straight points seems to bend."""
        return self.curvature is not None and not self.curvature.may_be_zero

    @property
    def bend_warning(self) -> str:
        """What a bend means for the prediction; empty if the points do not bend."""
        if self.curvature is None or not self.bends:
            return ""
        upward = self.curvature.value > 0
        way, error = ("upward", "low") if upward else ("downward", "high")
        return f"the points bend {way}, so the line's predictions beyond them are too {error}"

    def predict(self, compute: float) -> Estimate:
        """Return the loss of a new run of this many FLOPs, if the law holds there. The interval is
        that of one more run: t · s · √(1 + 1 ÷ n + (x − x̄)² ÷ Σ(x − x̄)²), in logarithms."""
        from_centre = np.log(compute) - self.centre[0]
        log_loss = self.centre[1] - self.exponent.value * from_centre
        error = self.deviation * np.sqrt(1 + 1 / self.runs + from_centre**2 / self.spread)
        return Estimate(*map(_exp, Estimate.around(log_loss, error, self.runs - 2)))


def fit(compute: ArrayLike, loss: ArrayLike) -> PowerLaw:
    """Fit a power law to the FLOPs and final losses of runs, all above 0.

    Raises:
        ValueError: the runs are too few, or too close together.
    """
    x, y = np.log(compute), np.log(loss)
    if (different := len(set(x.tolist()))) < MIN_RUNS:
        raise ValueError(
            f"different amounts of compute: {different}; a power law needs {MIN_RUNS} or more"
        )
    if (span := np.max(compute) / np.min(compute)) < MIN_SPAN:
        raise ValueError(
            f"the largest compute is {span:.3g} times the smallest; a power law needs {MIN_SPAN}"
            " times or more"
        )
    runs, from_centre = len(x), x - x.mean()
    spread = float(from_centre @ from_centre)
    slope = float(from_centre @ y) / spread
    residuals = y - y.mean() - slope * from_centre
    deviation = float(np.sqrt(residuals @ residuals / (runs - 2)))
    has_curvature = runs >= MIN_RUNS_FOR_CURVATURE
    return PowerLaw(
        exponent=Estimate.around(-slope, deviation / spread**0.5, runs - 2),
        deviation=deviation,
        curvature=_curvature(from_centre, residuals) if has_curvature else None,
        runs=runs,
        centre=(float(x.mean()), float(y.mean())),
        spread=spread,
    )


def _curvature(from_centre: FloatArray, residuals: FloatArray) -> Estimate:
    """Return the coefficient of x² in a parabola: the slope of the line's residuals on the part of
    x² that the line does not explain (Frisch & Waugh 1933)."""
    bow = from_centre**2
    bow = bow - bow.mean() - from_centre * (from_centre @ bow) / (from_centre @ from_centre)
    value = float(bow @ residuals / (bow @ bow))
    left, freedom = residuals - value * bow, len(bow) - 3
    return Estimate.around(value, float(np.sqrt(left @ left / freedom / (bow @ bow))), freedom)


def _exp(logarithm: float) -> float:
    """Return e to this power, infinite if it is too large: an interval of few runs may be."""
    with np.errstate(over="ignore"):
        return float(np.exp(logarithm))

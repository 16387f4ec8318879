"""A power law of loss against compute, fitted to final losses: L(C) = a · C^-b (Kaplan et al. 2020,
equation 1.3), by least squares of y = log L on x = log C. The intervals (Draper & Smith 1998,
chapters 1 and 3) assume independent scatter around the line, by the same percentage everywhere. If
the loss has a floor (Hoffmann et al. 2022, section 3.3), the points bend away from any straight
line, as the coefficient of x² shows."""

import dataclasses
import json
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from rungs.common.errors import UserError, errors_at
from rungs.common.shown_text import counted
from rungs.optim.schedule import learning_rate_schedule
from rungs.planning.flops import model_flops_per_token
from rungs.run.recorded_run import RecordedRun, finite_points
from rungs.run.step_table import FloatArray
from rungs.step.state import shapes_of

CONFIDENCE = 0.95
MIN_RUNS = 3
"""Least runs of different compute for a fit, as any line fits two points."""
MIN_SPAN = 2
"""Least ratio of the largest to the smallest compute."""
MIN_RUNS_FOR_CURVATURE = 5
EXTRAPOLATION = 10
"""Multiple of the largest compute at which the law predicts the loss."""
_SCHEDULE_TOLERANCE = 1e-4
"""Largest distance of the learning rate from its schedule's end, as a share of its peak."""
_MAX_STEPS = 2**31 - 1
"""Most steps that a schedule can count."""


class Estimate(NamedTuple):
    """A number with its 95% confidence interval."""

    value: float
    low: float
    high: float

    @classmethod
    def around(cls, value: float, standard_error: float, freedom: int) -> "Estimate":
        """Return a value with its interval by Student's t: 12.7 standard errors with one degree of
        freedom, 1.96 with many."""
        half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * standard_error
        return cls(value, value - half, value + half)

    @property
    def may_be_zero(self) -> bool:
        """Whether the interval contains 0."""
        return self.low <= 0 <= self.high

    def __str__(self) -> str:
        """Return the value ± half the interval, to two significant digits of the latter."""
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
        """a, the loss at one FLOP, far outside the measurements."""
        return _exp(self.centre[1] + self.exponent.value * self.centre[0])

    @property
    def scatter_percent(self) -> float:
        """One residual standard deviation, in percent of the loss."""
        return 100 * (_exp(self.deviation) - 1)

    @property
    def bends(self) -> bool:
        """Whether the coefficient of x² is significant, so that a straight line does not fit. One
        in twenty sets of straight points seems to bend."""
        return self.curvature is not None and not self.curvature.may_be_zero

    @property
    def bend_warning(self) -> str:
        """Consequence of a bend for the prediction; empty if the points do not bend."""
        if self.curvature is None or not self.bends:
            return ""
        upward = self.curvature.value > 0
        way, error = ("upward", "low") if upward else ("downward", "high")
        return f"the points bend {way}, so the line's predictions beyond them are too {error}"

    def predict(self, compute: float) -> Estimate:
        """Return the loss of a new run of this many FLOPs, if the law holds there, with the
        interval for one more run: t · s · √(1 + 1 ÷ n + (x − x̄)² ÷ Σ(x − x̄)²), in logarithms."""
        from_centre = np.log(compute) - self.centre[0]
        log_loss = self.centre[1] - self.exponent.value * from_centre
        error = self.deviation * np.sqrt(1 + 1 / self.runs + from_centre**2 / self.spread)
        return Estimate(*map(_exp, Estimate.around(log_loss, error, self.runs - 2)))


def fit(compute: ArrayLike, loss: ArrayLike) -> PowerLaw:
    """Fit a power law to the FLOPs and final losses of runs, all above 0. Raises ValueError if the
    runs are too few or too close together."""
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
    slope, error = _leading_coefficient(from_centre, y, 1)
    has_curvature = runs >= MIN_RUNS_FOR_CURVATURE
    bow = _leading_coefficient(from_centre, y, 2) if has_curvature else None
    return PowerLaw(
        exponent=Estimate.around(-slope, error, runs - 2),
        deviation=error * spread**0.5,
        curvature=bow and Estimate.around(*bow, runs - 3),
        runs=runs,
        centre=(float(x.mean()), float(y.mean())),
        spread=spread,
    )


def _leading_coefficient(x: FloatArray, y: FloatArray, degree: int) -> tuple[float, float]:
    """Return the first coefficient of the polynomial through the points, and its standard error."""
    coefficients, covariance = np.polyfit(x, y, degree, cov=True)
    return float(coefficients[0]), float(np.sqrt(covariance[0, 0]))


def _exp(logarithm: float) -> float:
    """Return e to this power, infinity on overflow, as intervals of few runs may be that wide."""
    with np.errstate(over="ignore"):
        return float(np.exp(logarithm))


@dataclasses.dataclass(frozen=True)
class ScaledRun:
    """The validation losses of a run over its compute."""

    name: str
    compute: FloatArray
    """FLOPs of training: tokens seen × `flops.model_flops_per_token`."""
    loss: FloatArray
    """Validation loss, in nats per token."""
    is_finished: bool
    """Whether the learning rate has reached the end of its schedule at the last validation. Before
    that, the loss is higher than in a run planned for as many tokens (Hoffmann et al. 2022, section
    2), which bends the law."""

    @classmethod
    def of(cls, run: RecordedRun) -> Self:
        """Return a recorded run, which must have a validation loss, as a scaled run."""
        model, train = run.config
        flops = model_flops_per_token(
            shapes_of(model, train.lora), model, run.config.sequence_length
        )
        tokens, loss = finite_points(run.column("tokens_seen"), run.column("validation_loss"))
        return cls(run.name, tokens * flops, loss, _is_finished(run))

    @property
    def end(self) -> tuple[float, float]:
        """Compute and loss of the last validation. Not of the best one, as the lowest of many noisy
        losses is too low, and its compute is not the run's."""
        return float(self.compute[-1]), float(self.loss[-1])


def _is_finished(run: RecordedRun) -> bool:
    """Judge by the learning rate alone, as the dataset's tokens are not known here."""
    train = run.config.train
    at = np.flatnonzero(np.isfinite(run.column("validation_loss")))[-1]
    step = min(int(run.column("global_step")[at]), _MAX_STEPS - 1)
    if step == 0:
        return False
    at_end = float(learning_rate_schedule(train, step + 1)(step))
    difference = abs(run.column("learning_rate")[at] - at_end)
    return bool(difference <= _SCHEDULE_TOLERANCE * train.learning_rate)


@dataclasses.dataclass(frozen=True)
class ScaledRuns:
    """Several runs, and the power law through their final losses."""

    runs: list[ScaledRun]
    law: PowerLaw
    cautions: list[str]
    """What the fit does not account for, one line each."""

    @classmethod
    def of(cls, runs: list[RecordedRun]) -> Self:
        """Fit a power law through runs. Raises UserError with a line per reason why none fits."""
        if lines := _problems(runs):
            raise UserError("\n".join(f"--power-law: {line}" for line in lines))
        scaled = [ScaledRun.of(run) for run in runs]
        compute, loss = zip(*(run.end for run in scaled), strict=True)
        with errors_at("--power-law: ", ValueError):
            law = fit(compute, loss)
        return cls(scaled, law, [*_unfinished(scaled), *_cautions(runs)])

    @property
    def largest_compute(self) -> float:
        return max(run.end[0] for run in self.runs)

    @property
    def prediction(self) -> Estimate:
        """The loss at `EXTRAPOLATION` times the largest compute."""
        return self.law.predict(EXTRAPOLATION * self.largest_compute)

    def as_text(self) -> str:
        """Return the law and its intervals, followed by a line for each caution."""
        law, prediction = self.law, self.prediction
        rows = {
            "power law": f"loss = {law.coefficient:.6g} · C^{-law.exponent.value:.6g}, C in FLOPs,"
            f" fitted to {law.runs} runs",
            "exponent": f"{law.exponent}, 95% interval",
            "scatter": f"{law.scatter_percent:.2g}% of the loss, one standard deviation",
            "prediction": f"{prediction.value:.4g} at {EXTRAPOLATION * self.largest_compute:.3g}"
            f" FLOPs, {EXTRAPOLATION} times the largest run; 95% interval"
            f" {prediction.low:.4g} to {prediction.high:.4g}",
        }
        lines = [f"{name:12}{text}" for name, text in rows.items()]
        return "\n".join([*lines, "", *_judgement(law), *self.cautions])


def _judgement(law: PowerLaw) -> list[str]:
    lines = []
    if law.exponent.may_be_zero:
        lines.append("The exponent may be 0: these runs do not show that loss falls with compute.")
    if law.curvature is None:
        lines.append(
            f"{law.runs} runs leave {counted(law.runs - 2, 'degree')} of freedom, so the intervals"
            f" are wide. With {MIN_RUNS_FOR_CURVATURE} or more runs the curvature is tested, too."
        )
        return lines
    verdict = f"Not a power law: {law.bend_warning}" if law.bends else "No curvature found"
    return [*lines, f"{verdict} (coefficient of log² C: {law.curvature}, 95% interval)."]


def _problems(runs: list[RecordedRun]) -> list[str]:
    """Return the reasons why no law fits these runs."""
    if len(runs) < MIN_RUNS:
        return [f"needs {MIN_RUNS} runs or more; {len(runs)} given"]
    lines = [
        f"{key} differs ({', '.join(values)}), so the losses are not comparable"
        for key in ("dataset", "target_offset")
        if len(values := _distinct([getattr(run.config.train, key) for run in runs])) > 1
    ]
    for run in runs:
        tokens, loss = finite_points(run.column("tokens_seen"), run.column("validation_loss"))
        if not loss.size:
            lines.append(f"{run.name} has no validation loss")
        elif not (loss[-1] > 0 and tokens[-1] > 0):
            lines.append(
                f"{run.name} ends at loss {loss[-1]:g} after {tokens[-1]:,.0f} tokens; a power law"
                " needs both above 0"
            )
    return lines


def _distinct(values: list[Any]) -> list[str]:
    """Return the distinct values, as JSON."""
    return list(dict.fromkeys(json.dumps(v, sort_keys=True, ensure_ascii=False) for v in values))


def _unfinished(runs: list[ScaledRun]) -> list[str]:
    return [
        f"{run.name} is not finished: its learning rate had not reached the end of its schedule at"
        " the last validation, so its loss is higher than that of a run planned for this compute."
        for run in runs
        if not run.is_finished
    ]


def _cautions(runs: list[RecordedRun]) -> list[str]:
    lines = [
        f"{run.name} starts from other weights; the compute that they took is not counted."
        for run in runs
        if run.config.train.start_from
    ]
    settings = {
        "sequence_length": [run.config.sequence_length for run in runs],
        "validation_tokens": [run.config.train.validation_tokens for run in runs],
        "start_val_token": [run.config.train.start_val_token for run in runs],
    }
    lines += [
        f"{key} differs ({', '.join(_distinct(values))}): the losses are of different sequences."
        for key, values in settings.items()
        if len(set(values)) > 1
    ]
    return lines

"""`"kind": "mixture"`: in which proportions datasets are best mixed."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field
from scipy import optimize, stats

from rungs.common.strict_json import check
from rungs.config.base import Positive
from rungs.experiments.confirm import Confirmed
from rungs.experiments.experiment import Changes, Outcome, Outcomes, Trial
from rungs.experiments.verdict import ALPHA

SEED = 0
"""Of the mixtures and of the runs that are explored."""
LEAST_WEIGHT = 0.01
"""Of a dataset, as each is validated on only where it is trained on."""


class Fit(NamedTuple):
    """The regression of a validation loss: log loss = Σ coefficient · weight (Ye et al. 2024, "Data
    Mixing Laws", arXiv 2403.16952, in its simplest form)."""

    coefficients: np.ndarray
    half_widths: np.ndarray
    """Of their 95% intervals, by Student's t."""

    def loss(self, weights: np.ndarray) -> float:
        return float(np.exp(self.coefficients @ weights))


class Mixture(Confirmed):
    """Runs on random mixtures of datasets, a regression, and its best mixture, confirmed."""

    kind: Literal["mixture"]
    datasets: Annotated[list[str], Field(min_length=2, max_length=20)]
    """Each needs a validation split."""
    runs: Annotated[int, Field(ge=4, le=1000)] = 12
    """Mixtures to try: at least two more than datasets."""
    concentration: Positive = 1.0
    """Of the Dirichlet distribution that the weights are drawn from: 1 is uniform; with less most
    mixtures are nearly one dataset."""
    targets: dict[str, Positive] | None = None
    """How much the loss on each dataset counts. null: all the same."""
    measure: Literal["validation_loss"] = "validation_loss"
    """The mean of the validation losses on all datasets, by `targets`."""

    @check
    def _is_determined(self) -> Iterator[str]:
        if self.runs < len(self.datasets) + 2:
            least = len(self.datasets) + 2
            yield f"runs: {self.runs} are too few for {len(self.datasets)} datasets; give {least}"

    @check
    def _targets_are_there(self) -> Iterator[str]:
        for name in sorted({*(self.targets or {})} - {*self.datasets}):
            yield f"targets: {name} is not in datasets"

    def value_of(self, outcome: Outcome) -> float | None:
        if outcome.value is None or not {*self.datasets} <= {*outcome.losses}:
            return None
        losses = [outcome.losses[name] for name in self.datasets]
        return float(np.average(losses, weights=self._importance))

    def explored(self, _: Outcomes) -> list[Trial]:
        drawn = np.random.default_rng(SEED).dirichlet(
            [self.concentration] * len(self.datasets), size=self.runs
        )
        return [
            self.trial(f"mixture {number}", SEED, self._changes(weights))
            for number, weights in enumerate(drawn, 1)
        ]

    def winner(self, outcomes: Outcomes) -> Changes | None:
        fits = self._fits(outcomes)
        return self._changes(self._best_weights(fits)) if fits else None

    def base_changes(self) -> Changes:
        return self._changes(np.full(len(self.datasets), 1 / len(self.datasets)))

    def conclusions(self, outcomes: Outcomes) -> list[str]:
        if not (fits := self._fits(outcomes)):
            return []
        lines = [
            f"log loss on {name} = "
            + " + ".join(
                f"({value:.3f} ± {half:.3f}) · {of}"
                for value, half, of in zip(
                    fit.coefficients, fit.half_widths, self.datasets, strict=True
                )
            )
            for name, fit in fits.items()
        ]
        best = self._changes(self._best_weights(fits))["dataset"]
        return [
            *lines,
            "The regression's best mixture is "
            + ", ".join(f"{name} {weight:.3g}" for name, weight in best.items())
            + "; the confirmation compares it with equal parts.",
        ]

    @property
    def _importance(self) -> list[float]:
        return [
            (self.targets or {}).get(name, 0.0 if self.targets else 1.0) for name in self.datasets
        ]

    def _changes(self, weights: np.ndarray) -> dict[str, Any]:
        least = LEAST_WEIGHT + (1 - LEAST_WEIGHT * len(weights)) * weights
        pairs = zip(self.datasets, least, strict=True)
        return {"dataset": {name: round(float(weight), 4) for name, weight in pairs}}

    def _fits(self, outcomes: Outcomes) -> Mapping[str, Fit]:
        """Return the regression for each dataset; none before all runs that can end have ended."""
        trials = self.explored(outcomes)
        ended = [outcomes[trial.name] for trial in trials if trial.name in outcomes]
        used = [one for one in ended if self.value_of(one) is not None]
        if len(ended) < len(trials) or len(used) < len(self.datasets) + 2:
            return {}
        weights = np.array(
            [[one.changes["dataset"][name] for name in self.datasets] for one in used]
        )
        weights /= weights.sum(axis=1, keepdims=True)
        return {
            name: _fit(weights, np.log([one.losses[name] for one in used]))
            for name in self.datasets
        }

    def _best_weights(self, fits: Mapping[str, Fit]) -> np.ndarray:
        count = len(self.datasets)

        def mean_loss(weights: np.ndarray) -> float:
            losses = [fit.loss(weights) for fit in fits.values()]
            return float(np.average(losses, weights=self._importance))

        found = optimize.minimize(
            mean_loss,
            np.full(count, 1 / count),
            method="SLSQP",
            bounds=[(0, 1)] * count,
            constraints={"type": "eq", "fun": lambda weights: weights.sum() - 1},
        )
        best: np.ndarray = np.clip(found.x, 0, 1)
        return best / best.sum()


def _fit(weights: np.ndarray, logs: np.ndarray) -> Fit:
    """Fit by least squares."""
    coefficients, *_ = np.linalg.lstsq(weights, logs, rcond=None)
    freedom = len(logs) - weights.shape[1]
    variance = float(np.sum((logs - weights @ coefficients) ** 2)) / freedom
    errors = np.sqrt(np.diag(np.linalg.pinv(weights.T @ weights)) * variance)
    return Fit(coefficients, stats.t.ppf(1 - ALPHA / 2, freedom) * errors)

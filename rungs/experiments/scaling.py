"""`"kind": "scaling"`: the best size and the loss for a budget that is larger than those tried
(Hoffmann et al. 2022, section 3.2, "IsoFLOP profiles")."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from matplotlib.figure import Figure
from pydantic import Field

from rungs.common.errors import UserError
from rungs.common.strict_json import check
from rungs.config.base import Positive
from rungs.config.run_config import RunConfig
from rungs.config.train_config import TrainConfig
from rungs.experiments.experiment import Experiment, Outcomes, Trial
from rungs.experiments.verdict import ALPHA
from rungs.planning import ladder
from rungs.run.derive import config_with
from rungs.run.folder import find_origin

RESAMPLES = 1000
"""Of the bootstrap."""
SPREAD = 4.0
"""How far, as a factor, the smallest and the largest size are from the middle one."""
LEAST_SIZES = 4
"""On a curve: a parabola through three leaves nothing to tell how far it is off."""
SEED = 0
CHECK = "check"


class Point(NamedTuple):
    """A run on an isoFLOP curve, or its best size by the parabola of loss over the logarithm of
    parameters."""

    budget: float
    parameters: float
    loss: float


class Law(NamedTuple):
    """Power laws through the optima: parameters = a · C^b, and loss = c · C^-d, C in FLOPs. Each of
    the two has slope and value at C = 1 of the straight line in logarithms."""

    size: tuple[float, float]
    loss: tuple[float, float]

    def at(self, budget: float) -> tuple[float, float]:
        """Return best size and loss for a budget."""
        found = [
            math.exp(slope * math.log(budget) + start) for slope, start in (self.size, self.loss)
        ]
        return found[0], found[1]


class Scaling(Experiment):
    """Runs of several sizes for each of several budgets, and what a larger budget would reach."""

    kind: Literal["scaling"]
    budgets: Annotated[list[Positive], Field(min_length=2)]
    """Compute of the runs in model FLOPs, such as `[1e12, 3e12, 1e13]`."""
    sizes: Annotated[int, Field(ge=LEAST_SIZES, le=15)] = 5
    """Sizes of the model for each budget, around 20 tokens per parameter."""
    seeds: Annotated[int, Field(ge=1, le=1000)] = 1
    """Runs of each size and budget."""
    predict: Positive | None = None
    """The budget to predict size and loss for. null: ten times the largest."""
    check_run: bool = False
    """Whether to train the predicted run, too, and to compare its loss with the prediction."""
    measure: Literal["validation_loss", "bits_per_byte"] = "validation_loss"

    @check
    def _has_no_other_budget(self) -> Iterator[str]:
        if self.budget:
            yield "budget: budgets say how long runs are; remove it"
        if self.budgets != sorted(set(self.budgets)):
            yield f"budgets: {self.budgets}: must rise"

    @property
    def target(self) -> float:
        """The budget of the prediction."""
        return self.predict or 10 * self.budgets[-1]

    def trials(self, outcomes: Outcomes) -> list[Trial]:
        found = [trial for trial, _, _ in self._curves()]
        points = self._points(outcomes)
        is_left = any(trial.name not in outcomes for trial in found)
        if not self.check_run or is_left or not self._is_complete(points):
            return found
        predicted = self._law(points).at(self.target)[0]
        size = _nearest(self._candidates, predicted)
        return [*found, self._trial(CHECK, SEED, self.target, size)]

    def most_runs(self) -> int:
        return super().most_runs() + self.check_run

    def conclusions(self, outcomes: Outcomes) -> list[str]:
        points = self._points(outcomes)
        if not self._is_complete(points):
            return []
        law, intervals = self._law(points), self._intervals(points)
        (size, loss), (sizes, losses, slopes) = law.at(self.target), intervals
        lines = [
            f"Best size for C FLOPs: proportional to C^{law.size[0]:.3f}"
            f" (95% interval {slopes[0]:.3f} to {slopes[1]:.3f}).",
            f"For {self.target:g} FLOPs: {size:,.0f} parameters (95% interval {sizes[0]:,.0f} to"
            f" {sizes[1]:,.0f}), and a loss of {loss:.4f} ({losses[0]:.4f} to {losses[1]:.4f}).",
        ]
        found = next((one.value for one in outcomes.values() if one.group == CHECK), None)
        if found is not None:
            verdict = "within" if losses[0] <= found <= losses[1] else "outside"
            lines.append(
                f"Checked by a run: {found:.4f}, {verdict} the interval and"
                f" {100 * (found / loss - 1):+.2f}% from the prediction."
            )
        return lines

    def charts(self, outcomes: Outcomes) -> dict[str, Callable[[Any], Figure]]:
        from rungs.experiments.charts import iso_flops

        points = self._points(outcomes)
        if not self._is_complete(points):
            return {}
        optima = self._optima(points)
        at_target = (self.target, *self._law(points).at(self.target))
        return {
            "scaling.png": functools.partial(
                iso_flops, points=points, optima=optima, prediction=Point(*at_target)
            )
        }

    @functools.cached_property
    def _config(self) -> RunConfig:
        model, train = config_with(find_origin(self.base), self.changes)
        assert isinstance(train, TrainConfig)
        if model.mup is None:
            raise UserError(
                f"base: {self.base} has no mup, with which one learning rate fits every size; see"
                " docs/experiments.md"
            )
        return RunConfig(model, train)

    @functools.cached_property
    def _candidates(self) -> list[ladder.ModelSize]:
        return list(ladder.candidates(self._config, SPREAD * self.target))

    def _sizes(self, budget: float) -> list[ladder.ModelSize]:
        """Return distinct sizes, equally far apart in logarithms."""
        middle = ladder.nearest_to_optimal(self._candidates, budget).parameters
        wanted = np.geomspace(middle / SPREAD, middle * SPREAD, self.sizes)
        found = {_nearest(self._candidates, each).parameters for each in wanted}
        if len(found) < LEAST_SIZES:
            raise UserError(
                f"budgets: {budget:g} FLOPs leave fewer than {LEAST_SIZES} sizes of this kind of"
                " model; give a larger one, or a base with smaller heads"
            )
        return [one for one in self._candidates if one.parameters in found]

    def _trial(self, group: str, seed: int, budget: float, size: ladder.ModelSize) -> Trial:
        tokens = size.tokens(budget)
        steps = max(1, round(tokens / self._config.tokens_per_step))
        return self.trial(group, seed, {**size.changes, "max_steps": steps})

    def _points(self, outcomes: Outcomes) -> list[Point]:
        return [
            Point(budget, size.parameters, found.value)
            for trial, budget, size in self._curves()
            if (found := outcomes.get(trial.name)) and found.value is not None
        ]

    def _curves(self) -> Iterator[tuple[Trial, float, ladder.ModelSize]]:
        """Yield the runs of the curves, with their budgets and sizes."""
        for seed in range(self.seeds):
            for budget in self.budgets:
                for size in self._sizes(budget):
                    group = f"{budget:g} FLOPs, {size.parameters:,} parameters"
                    yield self._trial(group, seed, budget, size), budget, size

    def _is_complete(self, points: Sequence[Point]) -> bool:
        """Whether each budget has points enough for a parabola and its residuals."""
        return all(
            sum(one.budget == each for one in points) >= LEAST_SIZES for each in self.budgets
        )

    def _optima(self, points: Sequence[Point]) -> list[Point]:
        return [_optimum([one for one in points if one.budget == each]) for each in self.budgets]

    def _law(self, points: Sequence[Point]) -> Law:
        optima = self._optima(points)
        logs = np.log([(one.budget, one.parameters, one.loss) for one in optima])
        size, loss = (np.polyfit(logs[:, 0], logs[:, column], 1) for column in (1, 2))
        return Law((size[0], size[1]), (loss[0], loss[1]))

    def _intervals(self, points: Sequence[Point]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return 95% intervals of size and loss for the target, and of the exponent of the size: of
        fits to curves plus residuals that were drawn again (bootstrap; Efron 1979)."""
        random, fitted = np.random.default_rng(SEED), []
        for budget in self.budgets:
            own = [one for one in points if one.budget == budget]
            logs = np.log([one.parameters for one in own])
            curve = np.polyval(np.polyfit(logs, [one.loss for one in own], 2), logs)
            scale = math.sqrt(len(own) / (len(own) - 3))
            residuals = scale * (np.array([one.loss for one in own]) - curve)
            fitted.append((own, curve, residuals))
        pooled, found = np.concatenate([each for *_, each in fitted]), []
        for _ in range(RESAMPLES):
            drawn = [
                one._replace(loss=loss + random.choice(pooled))
                for own, curve, _ in fitted
                for one, loss in zip(own, curve, strict=True)
            ]
            law = self._law(drawn)
            found.append((*law.at(self.target), law.size[0]))
        low, high = np.quantile(found, [ALPHA / 2, 1 - ALPHA / 2], axis=0)
        sizes, losses, slopes = np.stack([low, high], axis=1)
        return sizes, losses, slopes


def _nearest(sizes: Sequence[ladder.ModelSize], parameters: float) -> ladder.ModelSize:
    return min(sizes, key=lambda one: abs(math.log(one.parameters / parameters)))


def _optimum(points: Sequence[Point]) -> Point:
    """Return the minimum of the parabola; the best point if the curve has no minimum among them."""
    logs = np.log([one.parameters for one in points])
    curve = np.polyfit(logs, [one.loss for one in points], 2)
    at = -curve[1] / (2 * curve[0]) if curve[0] > 0 else math.nan
    if not logs.min() <= at <= logs.max():
        best = min(points, key=lambda one: one.loss)
        return Point(best.budget, best.parameters, best.loss)
    return Point(points[0].budget, math.exp(at), float(np.polyval(curve, at)))

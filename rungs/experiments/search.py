"""`"kind": "search"`: settings that Optuna proposes from the results so far."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from rungs.common.errors import UserError
from rungs.common.shown_text import counted, install_line
from rungs.common.strict_json import StrictModel, check
from rungs.config.base import Size
from rungs.experiments.confirm import Proposing
from rungs.experiments.experiment import Changes, Outcomes, Proposal, Trial, run_name

DIGITS = 3
"""Significant digits of proposed numbers."""
SEED = 0
"""Of all runs that are explored."""
Sampler = Literal["tpe", "random", "cmaes", "gp"]


class Range(StrictModel):
    """Numbers to search."""

    low: Annotated[float, Field(alias="from")]
    to: float
    log: bool = False
    """Whether equal factors count as equally far, as for learning rates."""

    @check
    def _rises(self) -> Iterator[str]:
        if not self.low < self.to or (self.log and self.low <= 0):
            yield f"ranges: from {self.low:g} to {self.to:g}: must rise, with log from above 0"


class Halving(StrictModel):
    """Successive halving: many settings in short runs, of which few go on. Runs have a constant
    learning rate; each is measured at the end of a branch in which it decays to 0."""

    steps: Annotated[list[Size], Field(min_length=2)]
    """Lengths at which runs are measured, rising: the last one is the full length."""
    keep: Annotated[float, Field(gt=0, lt=1)] = 0.34
    """The share that goes on after each but the last."""
    cooldown_percent: Annotated[float, Field(gt=0, lt=100)] = 20
    """The share of a measured run in which the rate decays."""

    @check
    def _rise(self) -> Iterator[str]:
        if self.steps != sorted(set(self.steps)) or self.trunk(self.steps[0]) < 1:
            yield f"halving: steps {self.steps}: must rise, from 2 or more"

    def trunk(self, steps: int) -> int:
        """Return the step at which the rate begins to decay towards the end at `steps`."""
        return round(steps * (1 - self.cooldown_percent / 100))

    def cooldown(self, steps: int) -> Changes:
        """Return the keys of a run that is constant until then, and decays."""
        percent = 100 * (steps - self.trunk(steps)) / steps
        schedule = {"schedule": "warmup_stable_decay", "decay_period_percent": percent}
        return {**schedule, "min_learning_rate_percent": 0.0, "max_steps": steps}


class Search(Proposing):
    """A search over ranges of keys."""

    kind: Literal["search"]
    ranges: Annotated[dict[str, Range | list[Any]], Field(min_length=1)]
    """By key of `model.json` or `train.json`, numbers `{"from": 0.001, "to": 0.1, "log": true}`, or
    a list of values to choose from."""
    sampler: Sampler = "tpe"
    """How Optuna proposes: tpe (Bergstra et al. 2011), random, cmaes or gp (with PyTorch)."""
    at_once: Annotated[int, Field(ge=1, le=1000)] = 1
    """Settings that are proposed before the next results are looked at: as many as there are
    workers. It bears on the proposals; the number of workers doesn't."""
    halving: Halving | None = None
    """Successive halving; null: every run has the whole budget."""

    @check
    def _has_one_length(self) -> Iterator[str]:
        if self.halving and self.budget:
            yield "budget: the steps of halving say how long runs are; remove one of the two"

    def ask(self, outcomes: Outcomes) -> list[Proposal]:
        if self.is_over(outcomes):
            return []
        known = outcomes.proposals
        values = self._values(outcomes, known, self.halving.steps[0] if self.halving else None)
        results = [(one.changes or {}, values[one.number]) for one in known]
        count = min(self.at_once, self.runs - len(known))
        new = proposals_of(self.sampler, self.ranges, results, count)
        return [Proposal(len(known) + at, changes) for at, changes in enumerate(new, 1)]

    def explored(self, outcomes: Outcomes) -> list[Trial]:
        if self.halving is None:
            return [self.trial(one.group, SEED, one.changes or {}) for one in outcomes.proposals]
        found: list[Trial] = []
        going, before = outcomes.proposals, None
        for steps in self.halving.steps:
            found += [trial for one in going for trial in self._measured_at(one, steps, before)]
            values = self._values(outcomes, going, steps)
            if not self.is_over(outcomes) or len(values) < len(going):
                break
            ordered = sorted(going, key=lambda one: values[one.number])
            going = ordered[: math.ceil(len(going) * self.halving.keep)]
            before = steps
        return found

    def most_explored(self) -> int:
        if self.halving is None:
            return self.runs
        going, total = self.runs, 0
        for _ in self.halving.steps:
            total, going = total + 2 * going, math.ceil(going * self.halving.keep)
        return total

    def winner(self, outcomes: Outcomes) -> Changes | None:
        if (best := self._best(outcomes)) is None:
            return None
        return {**(best.changes or {}), **self.base_changes()}

    def base_changes(self) -> Changes:
        return self.halving.cooldown(self.halving.steps[-1]) if self.halving else {}

    def possible_changes(self) -> Iterator[Changes]:
        for key, values in self.ranges.items():
            ends = [values.low, values.to] if isinstance(values, Range) else values
            yield from ({key: value} for value in ends)

    def conclusions(self, outcomes: Outcomes) -> list[str]:
        if (best := self._best(outcomes)) is None:
            return []
        return [
            f"The best of {counted(len(outcomes.proposals), 'setting')} is {best.group}. It was"
            " chosen for its result, which is partly luck: the confirmation with other seeds tells."
        ]

    def _best(self, outcomes: Outcomes) -> Proposal | None:
        """Return the best proposal among those that were measured at full length."""
        steps = self.halving.steps[-1] if self.halving else None
        values = self._values(outcomes, outcomes.proposals, steps)
        finite = [
            one for one in outcomes.proposals if math.isfinite(values.get(one.number, math.inf))
        ]
        return min(finite, key=lambda one: values[one.number], default=None)

    def _values(
        self, outcomes: Outcomes, proposals: Sequence[Proposal], steps: int | None
    ) -> dict[int, float]:
        """Return the measures of proposals, if they have ended, by number: the lower the better;
        infinity for a failed run."""
        sign = 1 if self.lower_is_better else -1
        found = {}
        for one in proposals:
            group = one.group if steps is None else _at(one, steps)
            if outcome := outcomes.get(run_name(group, SEED)):
                found[one.number] = math.inf if outcome.value is None else sign * outcome.value
        return found

    def _measured_at(self, one: Proposal, steps: int, before: int | None) -> list[Trial]:
        """Return the run that goes on, constantly, from where it was before, and its branch that
        ends at `steps`."""
        assert self.halving
        trunk, settings = self.halving.trunk(steps), one.changes or {}
        constant = {**settings, "schedule": "constant", "max_steps": trunk}
        goes_on = self.trial(_trunk(one, trunk), SEED, constant)
        if before is not None:
            former = self.halving.trunk(before)
            origin = run_name(_trunk(one, former), SEED)
            goes_on = dataclasses.replace(goes_on, branch=(origin, former - 1))
        ends = self.trial(_at(one, steps), SEED, {**settings, **self.halving.cooldown(steps)})
        return [goes_on, dataclasses.replace(ends, branch=(goes_on.name, trunk - 1))]


Ranges = Mapping[str, Range | list[Any]]


def proposals_of(
    sampler: Sampler, ranges: Ranges, known: Sequence[tuple[Changes, float]], count: int
) -> list[dict[str, Any]]:
    """Return new values for the keys of `ranges`, after results that are `known`, the lower the
    better. The sampler's seed is their number, so that a search that was interrupted proposes what
    it would have."""
    optuna, seed = _optuna(), len(known)
    make = {
        "tpe": lambda: optuna.samplers.TPESampler(seed=seed, constant_liar=True),
        "random": lambda: optuna.samplers.RandomSampler(seed=seed),
        "cmaes": lambda: optuna.samplers.CmaEsSampler(seed=seed),
        "gp": lambda: optuna.samplers.GPSampler(seed=seed),
    }
    distributions = {key: _distribution(values) for key, values in ranges.items()}
    study = optuna.create_study(sampler=make[sampler]())
    for changes, value in known:
        params = {key: changes[key] for key in ranges}
        study.add_trial(
            optuna.trial.create_trial(params=params, distributions=distributions, value=value)
        )
    asked = [study.ask(distributions).params for _ in range(count)]
    return [{key: _rounded(found[key], ranges[key]) for key in ranges} for found in asked]


def _trunk(one: Proposal, steps: int) -> str:
    return f"{one.group} until {steps}"


def _at(one: Proposal, steps: int) -> str:
    return f"{one.group} at {steps}"


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UserError(f"search: needs Optuna: {install_line('search')}") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _distribution(values: Range | list[Any]) -> Any:
    distributions = _optuna().distributions
    if isinstance(values, Range):
        return distributions.FloatDistribution(values.low, values.to, log=values.log)
    return distributions.CategoricalDistribution(values)


def _rounded(value: Any, values: Range | list[Any]) -> Any:
    """Return a number with few digits, within its range."""
    if not isinstance(values, Range):
        return value
    return min(max(float(f"{value:.{DIGITS}g}"), values.low), values.to)

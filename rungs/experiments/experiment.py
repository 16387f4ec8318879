"""What every kind of experiment has: the common keys of `experiment.json`, its runs and what became
of them."""

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from matplotlib.figure import Figure
from pydantic import Field

from rungs.common.errors import UserError
from rungs.common.strict_json import StrictModel, check
from rungs.config.base import Config, Positive, Size
from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import AnyRunConfig
from rungs.experiments.verdict import Sampling, Verdict, verdicts
from rungs.run.derive import config_with
from rungs.run.folder import find_origin

BASE = "base"
_LONGEST_NAME = 80
Changes = Mapping[str, Any]
"""Keys of a run's files with new values."""


class Budget(StrictModel):
    """How long each run trains: one of its keys."""

    steps: Size | None = None
    tokens: Annotated[int, Field(ge=1, le=2**62)] | None = None
    minutes: Positive | None = None
    """With compilation, validations and checkpoints, as `max_minutes`. Runs are then compared only
    if all of them are trained on devices of one kind."""
    flops: Positive | None = None
    """Model FLOPs, in which a multiply-add counts as 2."""

    @check
    def _is_one(self) -> Iterator[str]:
        if len(given := self.model_fields_set) != 1:
            yield f"budget: has {len(given)} of steps, tokens, minutes and flops; give one"

    def changes(self, config: AnyRunConfig) -> Changes:
        """Return the keys that give a run with this config such a length. Raises UserError if a
        reinforcement learning run is not given steps."""
        if isinstance(config.train, ReinforceConfig):
            if self.steps is None:
                raise UserError("budget: reinforcement learning is given steps")
            return {"steps": self.steps}
        if self.minutes:
            return {"max_minutes": self.minutes, "max_steps": None}
        return {"max_steps": self.steps or self._steps(config), "max_minutes": None}

    def _steps(self, config: Any) -> int:
        from rungs.planning.flops import training_flops_per_token

        tokens = self.tokens or round((self.flops or 0) / training_flops_per_token(config))
        return int(config.least_steps(max(tokens, 1)))


class Seeds(StrictModel):
    """As many seeds as a verdict takes."""

    first: Annotated[int, Field(ge=2, le=1000, alias="from")]
    """Seeds before the first look."""
    to: Annotated[int, Field(ge=2, le=1000)]
    """Seeds at most."""

    @check
    def _rise(self) -> Iterator[str]:
        if self.to < self.first:
            yield f"seeds: to ({self.to}) is less than from ({self.first})"


class Target(StrictModel):
    """How soon a run reaches a validation loss: one of its keys."""

    minutes_to: Positive | None = None
    """The loss to reach; the measure is the minutes of training until then."""
    tokens_to: Positive | None = None
    """The loss to reach; the measure is the training tokens until then."""

    @check
    def _is_one(self) -> Iterator[str]:
        if len(self.model_fields_set) != 1:
            yield "measure: give one of minutes_to and tokens_to"


class Score(StrictModel):
    """A score on a benchmark that the runs measure."""

    score: str
    """A benchmark in `benchmarks` of the runs, which then have `evaluate_every`, too."""


Measure = Literal["validation_loss", "train_loss", "bits_per_byte", "pass_at_1"] | Target | Score
NumberOfSeeds = Annotated[int, Field(ge=2, le=1000)]


@dataclasses.dataclass(frozen=True)
class Trial:
    """A run of an experiment."""

    group: str
    """What its seeds share: the name of a variant."""
    seed: int
    origin: str
    """The run folder that it is a copy of."""
    changes: Changes
    """Keys that differ from it, seed and length included."""
    branch: tuple[str, int] | None = None
    """Instead of `origin`: the name of another trial, and the step of its checkpoint that this run
    goes on from."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return run_name(self.group, self.seed)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    group: str
    seed: int
    run: str
    """Name of its folder."""
    changes: Changes
    value: float | None
    """The measure; None if the run failed, or never reached its target."""
    why: str | None = None
    """Why there is no value."""
    exit_code: int = 0
    """Of its process."""
    steps: int = 0
    tokens: int = 0
    minutes: float = 0.0
    """Of its steps: without start, compilation and checkpoints."""
    tokens_per_second: float | None = None
    device: str = ""
    curve: Sequence[tuple[float, float]] = ()
    """Training tokens before each validation and its loss, or steps and pass@1 if measured."""
    losses: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Validation loss at the end on each dataset, where there are several."""


@dataclasses.dataclass(frozen=True)
class Proposal:
    """Settings that a program proposed, after what was known then."""

    number: int
    """From 1."""
    changes: Changes | None
    """None if it proposed nothing that can be trained."""
    why: str = ""

    @property
    def group(self) -> str:
        """The name of its runs."""
        return f"{self.number}: {shown_changes(self.changes or {})}"[:_LONGEST_NAME]


class Outcomes(dict[str, Outcome]):
    """What is known: the outcomes of runs by the names of their folders; and what was proposed."""

    def __init__(
        self, runs: Mapping[str, Outcome] = {}, proposals: Sequence[Proposal] = ()
    ) -> None:
        super().__init__(runs)
        self.proposals = list(proposals)


class Comparison(NamedTuple):
    """A verdict on a group of runs."""

    group: str
    against: str
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        return {"group": self.group, "against": self.against, **self.verdict._asdict()}


class Experiment(Config):
    """An experiment: several runs and a decision."""

    question: str | None = None
    """What the experiment should answer; the title of its report."""
    kind: str
    """What the runs are; each kind has keys of its own. Absent: compare."""
    base: str
    """The run folder that all runs are copies of."""
    budget: Budget | None = None
    """How long each run trains: `{"steps": 1000}`, or tokens, minutes or flops. null: as long as
    `base`."""
    changes: dict[str, Any] = Field(default={})
    """Keys that all runs change, `base` too."""
    measure: Measure = "validation_loss"
    """What is compared, at the end of each run: validation_loss (in nats per token), train_loss
    (mean of the last 20 steps), bits_per_byte, or pass_at_1 of reinforcement learning;
    `{"score": "hellaswag"}`, a benchmark; or `{"tokens_to": 3.5}` or `{"minutes_to": 3.5}`, how
    soon a validation loss is reached."""
    smallest_effect: Positive | None = None
    """The smallest difference that matters, in units of the measure: two variants are "no
    different" if the interval of their difference lies within it. null: none is too small."""

    @property
    def lower_is_better(self) -> bool:
        return self.measure != "pass_at_1" and not isinstance(self.measure, Score)

    @property
    def ranks(self) -> bool:
        """Whether the table begins with the best."""
        return False

    @property
    def is_timed(self) -> bool:
        """Whether results depend on the speed of the device."""
        has_minutes = self.budget is not None and self.budget.minutes is not None
        return has_minutes or (isinstance(self.measure, Target) and bool(self.measure.minutes_to))

    @property
    def may_look_often(self) -> bool:
        """Whether verdicts hold after any number of runs, so that more may follow a verdict."""
        return False

    def trials(self, _: Outcomes) -> list[Trial]:
        """Return all runs that are called for, after what is known of earlier ones, in the order in
        which they are trained; none of runs that belong to no experiment. The experiment is at its
        end when all of them have an outcome."""
        return []

    def has_ended(self, outcomes: Outcomes) -> bool:
        """Whether all runs that are called for have an outcome."""
        return all(trial.name in outcomes for trial in self.trials(outcomes))

    def most_runs(self) -> int:
        """Return how many runs it takes at most."""
        return len(self.trials(Outcomes()))

    def value_of(self, outcome: Outcome) -> float | None:
        """Return what is compared of a run."""
        return outcome.value

    def possible_changes(self) -> Iterator[Changes]:
        """Yield changes of runs that later trials might have, to be checked before the first."""
        return iter(())

    def ask(self, _: Outcomes) -> list[Proposal]:
        """Return new proposals when all runs have an outcome; none when there is nothing more to
        try."""
        return []

    def comparisons(self, _: Outcomes) -> list[Comparison]:
        """Return the verdicts, as far as there are runs for them."""
        return []

    def conclusions(self, _: Outcomes) -> list[str]:
        """Return sentences for the report, below its table."""
        return []

    def charts(self, _: Outcomes) -> dict[str, Callable[[Any], Figure]]:
        """Return more charts for the report, by file name."""
        return {}

    def trial(self, group: str, seed: int, changes: Changes, origin: str | None = None) -> Trial:
        """Return a run with the experiment's own changes, a length and a seed. Raises UserError if
        a change is wrong."""
        origin = origin or self.base
        own = {**self.changes, **changes}
        length = _length(self.budget, origin, json.dumps(own)) if self.budget else {}
        return Trial(group, seed, origin, {**length, **own, "seed": seed})

    def better(self, values: Mapping[str, float]) -> str:
        """Return the key of the best value."""
        sign = 1 if self.lower_is_better else -1
        return min(values, key=lambda key: sign * values[key])


@functools.cache
def _length(budget: Budget, origin: str, changes: str) -> Changes:
    """Return the keys of a run's length; `changes` are JSON. `Experiment.trials` is asked often."""
    return budget.changes(config_with(find_origin(origin), json.loads(changes)))


def shown_changes(changes: Changes) -> str:
    """Return changes in one line, such as `learning_rate=0.001,seed=0`."""
    return ",".join(
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in changes.items()
    )


def run_name(group: str, seed: int) -> str:
    """Return the name of a run's folder."""
    return f"{folder_name(group)}-seed{seed}"


def folder_name(group: str) -> str:
    """Return a group's name as a part of a folder's name."""
    return re.sub(r"[^\w.,=+-]+", "-", group).strip("-.")


def values_of(experiment: Experiment, outcomes: Outcomes, group: str) -> dict[int, float]:
    """Return the measures of a group's finished runs, by seed."""
    found = {one.seed: experiment.value_of(one) for one in outcomes.values() if one.group == group}
    return {seed: value for seed, value in sorted(found.items()) if value is not None}


def compare_by_seed(
    experiment: Experiment, outcomes: Outcomes, pairs: Mapping[str, str], sampling: Sampling
) -> list[Comparison]:
    """Return the verdict on each group against another one, by name."""
    differences = {}
    for group, against in pairs.items():
        own, other = (values_of(experiment, outcomes, each) for each in (group, against))
        differences[group] = [own[seed] - other[seed] for seed in sorted(own.keys() & other.keys())]
    found = verdicts(differences, sampling, experiment.lower_is_better, experiment.smallest_effect)
    return [Comparison(group, against, found[group]) for group, against in pairs.items()]

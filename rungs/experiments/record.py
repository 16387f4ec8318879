"""`"kind": "record"`: is a validation loss reached, by the mean of several seeds?"""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from rungs.common.strict_json import check
from rungs.config.base import Positive
from rungs.experiments.experiment import Comparison, Experiment, Outcomes, Trial, values_of
from rungs.experiments.verdict import FixedNumber, Judgement, verdicts

GROUP = "record"
P = 0.01
"""The one-sided p-value that makes a record."""


class Record(Experiment):
    """Runs that differ in their seeds, and a loss to be below at their end."""

    kind: Literal["record"]
    target: Positive
    """The validation loss in nats per token that the mean of all runs must be below, with p <
    0.01."""
    seeds: Annotated[int, Field(ge=3, le=1000)] = 3
    """Runs: at least 3."""
    measure: Literal["validation_loss"] = "validation_loss"
    """The validation loss at the end of each run, in nats per token."""

    @check
    def _has_a_price(self) -> Iterator[str]:
        if not self.budget or self.budget.steps is not None:
            yield "budget: a record is of tokens, minutes or flops; give one"

    def trials(self, _: Outcomes) -> list[Trial]:
        return [self.trial(GROUP, seed, {}) for seed in range(self.seeds)]

    def comparisons(self, outcomes: Outcomes) -> list[Comparison]:
        """Return how far the mean is below the target, with an interval of 98%: it leaves out 0 at
        a one-sided p of 1%."""
        if not self.has_ended(outcomes):
            return []
        over = [value - self.target for value in values_of(self, outcomes, GROUP).values()]
        found = verdicts({GROUP: over}, FixedNumber(), True, self.smallest_effect, 2 * P)[GROUP]
        return [Comparison(GROUP, f"a loss of {self.target:g}", found)]

    def conclusions(self, outcomes: Outcomes) -> list[str]:
        if not (found := self.comparisons(outcomes)):
            return []
        verdict = found[0].verdict
        is_record = verdict.judgement is Judgement.BETTER and verdict.seeds == self.seeds
        p = verdict.p / 2 if verdict.difference < 0 else 1 - verdict.p / 2
        tokens = max(one.tokens for one in outcomes.values())
        return [
            f"{'A' if is_record else 'No'} record: the mean of {verdict.seeds} seeds is"
            f" {abs(verdict.difference):.4f} {'below' if verdict.difference < 0 else 'above'}"
            f" {self.target:g}, p = {p:.2g}, after {tokens:,} tokens each."
        ]

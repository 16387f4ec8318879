"""What kinds that choose among many runs have in common: their winner, which is partly lucky, is
compared with the base once more, with seeds that chose nothing."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from rungs.config.base import Positive
from rungs.experiments.experiment import (
    BASE,
    Changes,
    Comparison,
    Experiment,
    Outcomes,
    Trial,
    compare_by_seed,
)
from rungs.experiments.verdict import FixedNumber

WINNER = "winner"
FIRST_SEED = 100
"""Seeds from this one on choose nothing."""


class Confirmed(Experiment):
    """An experiment that ends with a confirmation."""

    confirm: Annotated[int, Field(ge=2, le=1000)] = 3
    """Fresh seeds with which the winner is compared with the base."""

    def explored(self, outcomes: Outcomes) -> list[Trial]:
        """Return the runs before the confirmation, as `trials`."""
        raise NotImplementedError

    def winner(self, outcomes: Outcomes) -> Changes | None:
        """Return the changes of the best run of those explored, None if all have failed."""
        raise NotImplementedError

    def trials(self, outcomes: Outcomes) -> list[Trial]:
        found = self.explored(outcomes)
        if not self.is_over(outcomes) or any(trial.name not in outcomes for trial in found):
            return found
        return [*found, *self._confirmation(self.winner(outcomes))]

    def most_runs(self) -> int:
        return self.most_explored() + 2 * self.confirm

    def most_explored(self) -> int:
        """Return how many runs there are at most before the confirmation."""
        return len(self.explored(Outcomes()))

    def is_over(self, _: Outcomes) -> bool:
        """Whether nothing more is to be proposed."""
        return True

    def comparisons(self, outcomes: Outcomes) -> list[Comparison]:
        if WINNER not in {one.group for one in outcomes.values()} or not self.has_ended(outcomes):
            return []
        return compare_by_seed(self, outcomes, {WINNER: BASE}, FixedNumber())

    def _confirmation(self, changes: Changes | None) -> Sequence[Trial]:
        if changes is None:
            return []
        return [
            self.trial(group, FIRST_SEED + number, own)
            for number in range(self.confirm)
            for group, own in ((BASE, self.base_changes()), (WINNER, changes))
        ]

    def base_changes(self) -> Changes:
        """Return the changes of the base in the confirmation."""
        return {}


class Proposing(Confirmed):
    """An experiment whose runs are proposed one after another, from the results so far."""

    runs: Annotated[int, Field(ge=1, le=100_000)]
    """Settings or ideas to try."""
    total_minutes: Positive | None = None
    """Propose no more when all runs together took so many minutes."""

    def most_explored(self) -> int:
        return super().most_explored() + self.runs

    def is_over(self, outcomes: Outcomes) -> bool:
        minutes = sum(one.minutes for one in outcomes.values())
        is_late = self.total_minutes is not None and minutes >= self.total_minutes
        return is_late or len(outcomes.proposals) >= self.runs

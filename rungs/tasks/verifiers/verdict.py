"""The result of a verifier for a completion."""

import math
from dataclasses import dataclass, field
from typing import Literal, Self

Status = Literal["ok", "timeout", "error", "out_of_memory"]
CORRECT = "correct"
"""Name of a reward that alone decides whether a completion is correct."""


@dataclass(frozen=True)
class Verdict:
    """The rewards of a completion, and whether it is correct."""

    rewards: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name; none if the verifier failed."""
    status: Status = "ok"
    """Outcome of the verifier."""
    message: str = ""
    """What went wrong, in one line; empty if nothing did."""

    @classmethod
    def of(cls, is_correct: bool) -> Self:
        """Return a reward of 1 for a correct completion, otherwise 0."""
        return cls({CORRECT: float(is_correct)})

    @property
    def total(self) -> float:
        """Sum of the rewards."""
        return math.fsum(self.rewards.values())

    @property
    def correct(self) -> bool:
        """Whether the reward named `correct`, or else the total, is at least 1."""
        return self.rewards.get(CORRECT, self.total) >= 1

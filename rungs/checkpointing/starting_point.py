"""What a start of a run begins with."""

import dataclasses
from typing import Any

from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.weights_file import Weights
from rungs.run.folder import RunFolder, StartOptions


@dataclasses.dataclass(frozen=True)
class Start:
    """A start of a run."""

    run: RunFolder
    config: Any  # AnyRunConfig, of the kind of run
    options: StartOptions
    saved: Checkpoint | None
    weights: Weights | None
    """The weights to continue from; None for random ones."""

    @property
    def first_step(self) -> int:
        return self.saved.step + 1 if self.saved else 0

    @property
    def stopped_after(self) -> int | None:
        """The validations without a better loss after which stop_after ended the run; None if it
        didn't, or now allows more."""
        limit = getattr(self.config.train, "stop_after", None)
        count = self.saved.meta.stopped_after if self.saved and not self.is_branching else None
        return count if limit and count and count >= limit else None

    @property
    def is_branching(self) -> bool:
        """Whether it takes the first step of its own after another run's."""
        return self.saved is not None and self.saved.step == self.config.train.branch_step

    @property
    def fresh_start(self) -> str:
        """How to begin anew if the run can't go on from its checkpoint, for a message."""
        return "make a run without --from-step" if self.is_branching else "start over with --fresh"

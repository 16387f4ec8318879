"""When checkpoints and validations are due: in steps, and if the config says so, in minutes."""

import time
from collections.abc import Callable
from typing import NamedTuple

from rungs.config.optimization_config import OptimizationConfig
from rungs.config.train_config import TrainConfig


class Due(NamedTuple):
    """What follows a step."""

    checkpoint: bool
    validation: bool
    competes: bool
    """Whether the checkpoint may become the best: one at an interval of steps may. Those that the
    clock or a signal asks for differ from start to start."""

    @property
    def anything(self) -> bool:
        return self.checkpoint or self.validation


class Intervals:
    """Counts steps from 0 and minutes from the start of this process.

    Args:
        train: with the intervals.
        any_process: whether a condition holds in any process, so that all agree on the time.
    """

    def __init__(self, train: OptimizationConfig, any_process: Callable[[bool], bool]) -> None:
        self._train, self._any_process = train, any_process
        self._saved_at = self._validated_at = time.monotonic()

    def after(self, step: int, is_last: bool) -> Due:
        """Return what is due after a step; after a run's last one, both are."""
        train, now = self._train, time.monotonic()
        competes = is_last or step % train.checkpoint_interval == 0
        due = Due(competes, is_last or is_validation_step(train, step), competes)
        if isinstance(train, TrainConfig):
            is_saved_now = self._is_over(train.checkpoint_minutes, self._saved_at)
            is_validated_now = self._is_over(train.validation_minutes, self._validated_at)
            due = Due(due.checkpoint or is_saved_now, due.validation or is_validated_now, competes)
        if due.checkpoint:
            self._saved_at = now
        if due.validation:
            self._validated_at = now
        return due

    def _is_over(self, minutes: float | None, since: float) -> bool:
        if minutes is None:
            return False
        return self._any_process(time.monotonic() - since > 60 * minutes)


def is_validation_step(train: OptimizationConfig, step: int) -> bool:
    """Whether a validation is due after a step because of its number."""
    interval = train.validation_interval if isinstance(train, TrainConfig) else None
    return step % (interval or train.checkpoint_interval) == 0

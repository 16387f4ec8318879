"""Faults of going on: what a resumed process could do otherwise than one that was never killed."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx

from rungs.data.loader import Batch, TrainingData
from rungs.run.metrics import MetricsLog
from rungs.training import start


def steps_counted_anew() -> None:
    """The optimizer's count of steps, which makes the key of dropout, begins at 0 again."""
    _change_restored("step")


def moments_left_behind() -> None:
    """The mean of gradients begins at 0 again."""
    _change_restored("mu")


def _change_restored(name: str) -> None:
    """Have the variables of this name restored as zeros."""
    restore = start.restore

    def restore_but_one(*args: Any) -> Any:
        model, optimizer = restore(*args)
        for path, variable in nnx.to_flat_state(nnx.state(optimizer)):
            if name in path:
                variable.set_value(jnp.zeros_like(variable.get_value()))
        return model, optimizer

    start.restore = restore_but_one  # type: ignore[assignment]


def data_one_step_ahead() -> None:
    """The first batch after a start is that of the step after."""
    batches = TrainingData.batches

    def ahead(self: TrainingData, first_step: int = 0, *args: Any) -> Iterator[Batch]:
        yield from batches(self, first_step + 1 if first_step else 0, *args)
        if first_step:
            yield self.batch(self.total_steps - 1, *args)

    TrainingData.batches = ahead  # type: ignore[method-assign, assignment]


def last_line_twice() -> None:
    """The line of the step that was saved is added again."""
    init = MetricsLog.__init__

    def init_and_double(self: MetricsLog, path: Any, last_step: int) -> None:
        init(self, path, last_step)
        if last_step >= 0:
            self._file.write(path.read_bytes().splitlines(keepends=True)[-1])

    MetricsLog.__init__ = init_and_double  # type: ignore[method-assign]

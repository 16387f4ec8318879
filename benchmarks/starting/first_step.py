"""`train.py` that ends after its first step, with a line: `first_step.py RUN …`."""

from rungs.common import signals

if __name__ == "__main__":
    signals.exit_on_signal()

from rungs.common.command import importing, run_command

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

from rungs.cli import train

if TYPE_CHECKING:
    from rungs.run.metrics import StepMetrics


def end_after(read: "Callable[..., StepMetrics]") -> Callable[..., NoReturn]:
    """Return a function that reads a step's results, says so and ends the process."""

    def read_and_end(*arguments: Any) -> NoReturn:
        read(*arguments)
        print("first step", flush=True)
        os._exit(0)

    return read_and_end


if __name__ == "__main__":
    with importing():
        from rungs.training.dataset_learner import DatasetLearner
    learner: Any = DatasetLearner
    learner.read = end_after(learner.read)
    run_command(train.main)

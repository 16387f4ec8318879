"""Protocols for what differs between kinds of runs: opening inputs and taking steps. A kind has two
classes: `Inputs`, opened and checked before anything changes on disk, and the `Learner` that they
make; `start.launch` and `trainer.Trainer` are common. Training on datasets is
`dataset_learner.py`, reinforcement learning `rungs/reinforcement/policy_learner.py`."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing.load import Start
from rungs.checkpointing.manifest import Checkpoint
from rungs.data.provenance import Provenance
from rungs.model.gpt import GPT
from rungs.optim.skipping_optimizer import SkippingOptimizer
from rungs.run.folder import RunFolder
from rungs.run.metrics import R
from rungs.step.objective import Objective
from rungs.step.train_step import Step, StepResult
from rungs.training.background import Benchmarks


class Stops(NamedTuple):
    """Functions that tell whether to stop."""

    here: Callable[[], bool]
    """According to this process."""
    anywhere: Callable[[], bool]
    """According to any process; all must call it together."""


def never() -> bool:
    """Return False."""
    return False


NEVER = Stops(never, never)
DATA = "data"
"""Name in profiles of what the host does for a step's data."""


def record_fields(
    start: Start, step: int, result: StepResult, tokens_seen: int, tokens: int, seconds: float
) -> dict[str, Any]:
    """Return the fields of `StepRecord`, common to every kind of step. `result` is on the host;
    `tokens_seen` counts all steps so far, `tokens` this one; `seconds` is the step's duration."""
    return {
        "global_step": step,
        "tokens_seen": tokens_seen,
        "train_loss": result.loss,
        "learning_rate": float(result.learning_rate),
        "gradient_norm": float(result.gradient_norm),
        "clipped": bool(result.clipped),
        "dropped_microbatches": result.dropped,
        "step_seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "loss_scale": None if result.loss_scale is None else float(result.loss_scale),
        "resumed": step == start.first_step > 0 or None,
    }


class Learner(Protocol[R]):
    """Takes the steps of a run."""

    model: GPT
    optimizer: SkippingOptimizer
    record: Provenance
    reads_late: bool
    """Whether a step's results are read after the next step is dispatched."""

    @property
    def peak_tokens_per_second(self) -> float | None:
        """Tokens per second at the peak FLOP/s of all devices, or None."""

    @property
    def failure(self) -> Exception | None:
        """Why no further step can be taken, or None."""

    def take(self, step: int, stops: Stops, learning_rate: np.float32 | None) -> Any:
        """Take a step; return the argument for `read`. `learning_rate` is that of `RunLength`.
        Raises Interrupted if the step was abandoned, with model and optimizer unchanged."""

    def read(self, step: int, taken: Any) -> tuple[R, StepResult]:
        """Wait until a step is complete; return its metrics, and its result on the host."""

    def validate(self, metrics: R, stops: Stops) -> R:
        """Return the latest step's metrics with its validation; raises Interrupted."""

    def lacks_validation(self, saved: Checkpoint, metrics: R) -> bool:
        """Return whether a checkpoint's validation was due but interrupted."""

    def losses(self, metrics: R) -> tuple[float | None, float | None]:
        """Return a step's validation loss, and its selection loss, by which the best checkpoint is
        chosen; None for what it lacks."""

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """Return the arrays (A, B, S) of a failed step by name, {} if no longer known."""

    def headline(self, steps: Sequence[R]) -> dict[str, str]:
        """Return the values that the progress line shows for some steps."""

    def log_start(self, start: Start, mesh: Mesh) -> None:
        """Log a description of this start."""

    def summary(self, run: RunFolder, last: R | None) -> str:
        """Return the results so far, in words. `last` is the last step of this start, or None."""

    def retake(self, step: int, learning_rate: np.float32 | None, *, skipped: bool) -> Any:
        """Repeat a step without records; `skipped` if its update was, because of a loss spike."""


class Replayed(NamedTuple):
    """Inputs of `--replay` for a kind of run."""

    objective: Objective
    step: Step
    array_names: tuple[str, ...]
    """Names of a batch's arrays, in the step's order."""


class Inputs(Protocol[R]):
    """Everything that a start has opened and checked before it changes anything."""

    metrics: ClassVar[type[Any]]

    @property
    def total_steps(self) -> int: ...

    @property
    def datasets_dir(self) -> Path | None:
        """Folder of the datasets; None for the default."""

    @property
    def record(self) -> Provenance:
        """Data and tokenizer."""

    def edit_to_extend(self, done: int) -> str:
        """Return the edit that makes the run longer after `done` steps, for a message."""

    def learner(self, start: Start, mesh: Mesh, steps: Sequence[R]) -> Learner[R]:
        """Create or restore model and optimizer, and return their learner. In `start`, devices have
        resolved the config; `steps` were recorded before it, in order."""

    def resources(self, start: Start, mesh: Mesh) -> AbstractContextManager[None]:
        """Warn of too little memory or disk space; turn its errors into a `RunFailure` with
        advice."""

    @property
    def benchmarks(self) -> Benchmarks | None:
        """What checkpoints are measured on while the run trains."""


class Kind(NamedTuple):
    """A kind of run."""

    open_inputs: Callable[[Start, ExitStack], Inputs[Any]]
    """Opens and checks the inputs of a start; the stack closes them. Raises UserError."""
    replayed: Callable[[Start, Mesh], Replayed]
    """Returns the inputs of `--replay`."""

"""What differs between kinds of runs: what is opened at a start, and how a step is taken.

`start.launch` and `trainer.Trainer` are the same for all. A kind of run has two classes: `Inputs`,
opened and checked before anything changes on disk, and the `Learner` that they make.
Next-token training is `next_token.py`, reinforcement learning `rungs/reinforcement/learner.py`.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.weights_file import Weights
from rungs.model.gpt import GPT
from rungs.optim.multi_steps import MultiSteps
from rungs.run.folder import RunFolder, StartOptions
from rungs.run.metrics import R
from rungs.step.objective import Objective
from rungs.step.train_step import Step, StepResult

if TYPE_CHECKING:
    from rungs.training.trainer import Trainer


class Stops(NamedTuple):
    """Whether to stop."""

    here: Callable[[], bool]
    """What this process knows."""
    anywhere: Callable[[], bool]
    """What all processes agree on; all must call it together."""


def never() -> bool:
    """Return False."""
    return False


NEVER = Stops(never, never)


@dataclasses.dataclass(frozen=True)
class Start:
    """A start of a run."""

    run: RunFolder
    config: Any  # AnyRunConfig; a kind of run knows which
    options: StartOptions
    saved: Checkpoint | None
    """The checkpoint to resume from."""
    weights: Weights | None
    """The weights to continue from; None for random ones."""

    @property
    def first_step(self) -> int:
        return self.saved.step + 1 if self.saved else 0


class Record(NamedTuple):
    """What checkpoints record about data and tokenizer."""

    datasets: dict[str, dict[str, str]]
    tokenizer: str


def record_fields(
    start: Start, step: int, result: StepResult, tokens_seen: int, tokens: int, seconds: float
) -> dict[str, Any]:
    """Return the fields of `StepRecord`, which the metrics of every kind of step have. `result` is
    on the host; `tokens_seen` are those of all steps up to this one, `tokens` its own; `seconds`
    are since the end of the step before."""
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
    optimizer: MultiSteps
    record: Record
    reads_late: bool
    """Whether a step's results are read after the next step is dispatched."""

    @property
    def peak_tokens_per_second(self) -> float | None:
        """Tokens per second at the peak FLOP/s of all devices, if that is known."""

    @property
    def failure(self) -> Exception | None:
        """Why no step after the last one can be taken; None so far."""

    def take(self, step: int, stops: Stops, learning_rate: np.float32 | None) -> Any:
        """Take a step; return what `read` waits for. `learning_rate` is that of `RunLength`. Raises
        Interrupted if the step was abandoned, with model and optimizer unchanged."""

    def read(self, step: int, taken: Any) -> tuple[R, StepResult]:
        """Wait until a step is complete; return its metrics, and its result on the host."""

    def validate(self, metrics: R, stops: Stops) -> R:
        """Return the metrics of the latest step with its validation; raises Interrupted."""

    def lacks_validation(self, saved: Checkpoint, metrics: R) -> bool:
        """Return whether the validation of a checkpoint was due, but interrupted."""

    def losses(self, metrics: R) -> tuple[float | None, float | None]:
        """Return the validation loss of a step, and the number by which the best checkpoint is
        chosen, the lower the better; None for what it lacks."""

    def batch(self, step: int) -> Mapping[str, np.ndarray]:
        """Return the arrays (A, B, S) of a failed step by name, to record it; {} if they are no
        longer known."""

    def headline(self, steps: Sequence[R]) -> dict[str, str]:
        """Return what the progress line says about some steps."""

    def log_start(self, start: Start, mesh: Mesh) -> None:
        """Log what this start does."""

    def summary(self, run: RunFolder, last: R | None) -> str:
        """Return the results of the run so far, in words. `last` is the last step of this start,
        None if it took none."""

    def retake(self, step: int, learning_rate: np.float32 | None, *, skipped: bool) -> Any:
        """Take a step again and record nothing. `skipped` says whether its update was skipped
        because of a loss spike."""


class Replayed(NamedTuple):
    """What `--replay` needs to know of a kind of run."""

    objective: Objective
    step: Step
    array_names: tuple[str, ...]
    """Names of the arrays of a batch, in the order that the step takes them."""


class Inputs(Protocol[R]):
    """What a start has opened and checked before it changes anything."""

    metrics: ClassVar[type[Any]]
    """The metrics of a step."""

    @property
    def total_steps(self) -> int: ...

    @property
    def datasets_dir(self) -> Path | None:
        """Where datasets are; None for where they are by default."""

    @property
    def tokenizer_file(self) -> Path | None:
        """Copied into checkpoints; None if it is only on the hub."""

    @property
    def tokenizer_place(self) -> Path | str:
        """Where the tokenizer is; see `load_tokenizer`."""

    def edit_to_extend(self) -> str:
        """Return the edit that makes the run longer, for a message."""

    def learner(self, start: Start, mesh: Mesh, steps: Sequence[R]) -> Learner[R]:
        """Create or restore model and optimizer, and return what trains them. The config of `start`
        is what the devices chose; `steps` were recorded before it, in order."""

    def resources(self, start: Start, mesh: Mesh) -> AbstractContextManager[None]:
        """Warn if memory or disk will not do, and turn errors about them into a `RunFailure` with
        advice."""

    def add_hooks(self, start: Start, trainer: "Trainer[R]") -> None:
        """Add what this kind of run does after some steps."""


class Kind(NamedTuple):
    """A kind of run."""

    open_inputs: Callable[[Start, ExitStack], Inputs[Any]]
    """Opens and checks the inputs of a start; the stack closes them. Raises UserError."""
    replayed: Callable[[Start, Mesh], Replayed]
    """Returns what it takes to run a failed step again."""

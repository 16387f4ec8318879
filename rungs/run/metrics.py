"""`metrics.jsonl`: a line per global step, each step exactly once, also after a crash."""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, TypeAdapter, WrapValidator

from rungs.common import disk
from rungs.common.errors import RunFailure
from rungs.common.paths import is_file

METRICS_FILE = "metrics.jsonl"

Spike = Literal["seen", "skipped"]

log = logging.getLogger("rungs")


def _or_null(value: Any, check: Callable[[Any], float]) -> Any:
    return None if value is None else check(value)


Count = Annotated[int, Field(ge=0, le=2**62)]
Figure = Annotated[float, WrapValidator(_or_null)]
"""As it is read, also the null that stands for what was not finite."""


@dataclasses.dataclass(frozen=True)
class StepMetrics:
    """What one global step left behind. A number that is not finite stands as null."""

    global_step: Count
    """Counted from 0."""
    tokens_seen: Count
    """Training tokens seen up to and including this step."""
    train_loss: float | None
    """Mean cross-entropy over the step's finite microbatches, in nats per target that counts."""
    learning_rate: float | None
    gradient_norm: float | None
    """Global norm of the accumulated gradient, before clipping."""
    clipped: bool
    dropped_microbatches: Count
    """Microbatches left out because their loss or gradient was not finite."""
    step_seconds: Figure
    """From the completion of the step before to this one's, stalls included."""
    tokens_per_second: Figure
    validation_loss: float | None = None
    """Mean cross-entropy on the validation tokens; only at steps that have a validation."""
    load_balancing_loss: float | None = None
    """Mixture of experts: mean over layers; 1 where every expert gets as many tokens."""
    expert_tokens: list[list[Count]] | None = None
    """Mixture of experts: tokens that went through each expert of each layer."""
    spike: Spike | None = None
    """Where the loss is far above those before (`health.py`): whether the update was left out."""
    loss_scale: Figure | None = None
    """In float16: what the loss was multiplied by. A microbatch whose gradients overflow at it is
    left out and not counted as dropped; the next step has half of it."""

    def as_line(self) -> str:
        """The step's line in the file; what not every step has, only where this one has it."""
        values = {key: _finite(value) for key, value in dataclasses.asdict(self).items()}
        for key in _NOT_IN_EVERY_STEP:
            if values[key] is None:
                del values[key]
        return json.dumps(values) + "\n"


_NOT_IN_EVERY_STEP = [
    field.name for field in dataclasses.fields(StepMetrics) if field.default is None
]
_STEP = TypeAdapter(StepMetrics)


def read(path: Path) -> list[StepMetrics]:
    """The steps recorded in the file, in order. A line that is torn, and what another version of
    Rungs recorded besides, is left out."""
    if not is_file(path):
        return []
    steps: list[StepMetrics] = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, RecursionError):
            steps.append(_STEP.validate_python(json.loads(line)))
    return steps


class MetricsLog:
    """The file, open for appending; what it held beyond `last_step` is dropped first."""

    def __init__(self, path: Path, last_step: int) -> None:
        kept = [step for step in read(path) if step.global_step <= last_step]
        if (missing := last_step + 1 - len(kept)) > 0:
            log.warning("%s: %d steps before this start are not recorded", path, missing)
        self._path = path
        self._begin(kept)

    def append(self, step: StepMetrics) -> None:
        """Add a step; the line outlives the process from here on.

        Raises:
            RunFailure: there is no room, or the file is not what was written to it any more.
        """
        line = step.as_line().encode()
        with disk.writing(self._path, f"the metrics of step {step.global_step}", len(line)):
            self._add(line)
            self._refuse_loss()

    def replace_last(self, step: StepMetrics) -> None:
        """Put this in the place of the last step's line; raises RunFailure."""
        self._file.close()
        self._begin([*read(self._path)[:-1], step])

    def sync(self) -> None:
        """Wait until every line added so far would outlive the machine, too; raises RunFailure."""
        with disk.writing(self._path, "the metrics so far", self._bytes):
            disk.flush(self._file)

    def _begin(self, steps: list[StepMetrics]) -> None:
        """Have just these steps in the file, or what was there; open it to append to."""
        content = "".join(step.as_line() for step in steps).encode()
        with disk.writing(self._path, "the metrics so far", len(content)):
            _replace(self._path, content)
            self._file = self._path.open("ab", buffering=0)
        self._bytes = len(content)

    def _add(self, line: bytes) -> None:
        """Add all of a line or nothing."""
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._bytes)
            raise
        self._bytes += len(line)

    def _refuse_loss(self) -> None:
        """Raises RunFailure where nobody would find what is written: a file that was removed still
        takes lines from the process that holds it open."""
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_size >= self._bytes:
                return
        run = self._path.parent
        if run.is_dir():
            raise RunFailure(
                f"{self._path}: removed, cut or replaced while it was written to; what is missing"
                " of it is lost; run the same command to resume from the last checkpoint"
            )
        raise RunFailure(
            f"{run}: the run folder was removed or moved while it was trained; what was learned"
            " since its last checkpoint is lost; bring the folder back and run the same command,"
            " or start over"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def _replace(path: Path, content: bytes) -> None:
    """Give a file other content, whole or not at all."""
    replacement = path.with_name(path.name + ".new")
    try:
        with replacement.open("wb") as file:
            file.write(content)
            disk.flush(file)
        replacement.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            replacement.unlink(missing_ok=True)
        raise
    disk.sync_to_disk(path.parent)


class NullMetricsLog(MetricsLog):
    """Keeps nothing: the first process of a run records for all."""

    def __init__(self) -> None: ...

    def append(self, step: StepMetrics) -> None: ...

    def replace_last(self, step: StepMetrics) -> None: ...

    def sync(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def best_step(steps: list[StepMetrics], checkpoint_interval: int) -> StepMetrics | None:
    """The step of the best checkpoint: lowest validation loss or, where no step was validated,
    lowest training loss among the steps at the interval and the last."""
    validated = [(step.validation_loss, step) for step in steps if step.validation_loss is not None]
    due = [step for step in steps if step.global_step % checkpoint_interval == 0] + steps[-1:]
    trained = [(step.train_loss, step) for step in due if step.train_loss is not None]
    return min(validated or trained, key=lambda pair: pair[0], default=(None, None))[1]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

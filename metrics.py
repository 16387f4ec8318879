"""`metrics.jsonl`: a line per global step, each step exactly once, also after a crash."""

import contextlib
import dataclasses
import json
import logging
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter, WrapValidator

from disk import sync_to_disk
from paths import is_file

METRICS_FILE = "metrics.jsonl"

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

    def as_line(self) -> str:
        """The step's line in the file; what not every step has, only where this one has it."""
        values = {key: _finite(value) for key, value in dataclasses.asdict(self).items()}
        for key in ("validation_loss", "load_balancing_loss", "expert_tokens"):
            if values[key] is None:
                del values[key]
        return json.dumps(values) + "\n"


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
        replacement = path.with_name(path.name + ".new")
        with replacement.open("w", encoding="utf-8") as file:
            file.writelines(step.as_line() for step in kept)
            file.flush()
            os.fsync(file.fileno())
        replacement.replace(path)
        sync_to_disk(path.parent)
        self._file = path.open("a", encoding="utf-8")

    def append(self, step: StepMetrics) -> None:
        """Add a step; the line outlives the process from here on."""
        self._file.write(step.as_line())
        self._file.flush()

    def sync(self) -> None:
        """Wait until every line added so far would outlive the machine, too."""
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


class Unrecorded(MetricsLog):
    """Keeps nothing: the first process of a run records for all."""

    def __init__(self) -> None: ...

    def append(self, step: StepMetrics) -> None: ...

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

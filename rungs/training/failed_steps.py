"""What happens on the host after a failed step, one with a NaN, an infinity or a loss spike: when a
loss counts as a spike, warnings, what is saved for `--replay`. For what the compiled step does, see
docs/architecture.md, "What happens to a failed step".

failed-steps/step-000123/
  step.json           step number, what was not finite, both configs
  batch.safetensors   inputs and targets
  checkpoint/         the newest earlier checkpoint, hard-linked to checkpoints/ if possible;
                      missing if there was none"""

import collections
import hashlib
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from safetensors.numpy import load_file, save

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.load import Start
from rungs.checkpointing.manifest import Checkpoint, read_checkpoint, run_config
from rungs.checkpointing.saver import Saver
from rungs.common import disk, paths, shown_text, strict_json
from rungs.common.errors import RunFailure, UserError
from rungs.common.run_log import log
from rungs.config.base import NEVER
from rungs.config.run_config import AnyRunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel import processes
from rungs.run.folder import RunFolder
from rungs.run.metrics import StepMetrics, StepRecord
from rungs.step.nonfinite import Flags, checked_names, describe_first, finite_flags, nonfinite_names
from rungs.step.state import named_arrays
from rungs.step.train_step import StepResult
from rungs.training.learner import Learner
from rungs.training.run_length import RunLength

MAX_FAILED_STEPS = 10
"""Most that are saved per run; the first ones tell most."""
STEP_FILE, BATCH_FILE, CHECKPOINT_FOLDER = "step.json", "batch.safetensors", "checkpoint"
WINDOW_STEPS = 128
"""Steps whose losses are compared, as in OLMo-core's `SkipStepOptimizer`."""
MIN_STEPS = 32
"""Losses in the window without which none counts as a spike."""
DEVIATIONS = 6.0
"""Minimum standard deviations of a spike above the median. OLMo-core uses six above the mean, but
spikes raise the mean and the standard deviation too."""
MIN_FACTOR = 1.5
"""Minimum ratio of a spike to the median: if losses hardly differ, noise is many deviations."""
MIN_RISE = 0.1
"""Minimum nats of a spike above the median: near zero, batches differ by large factors."""
DEVIATIONS_PER_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_UNREAD_STEPS = 1
"""Previous steps whose results are unread when a step is dispatched."""


class LossSpikeDetector:
    """Tracks the losses of a run's latest steps, including those before this start, in order."""

    def __init__(self, before: Iterable[StepMetrics] = ()) -> None:
        self._losses: collections.deque[tuple[int, float]] = collections.deque(
            maxlen=WINDOW_STEPS + _UNREAD_STEPS
        )
        for metrics in before:
            self.add(metrics)

    def add(self, metrics: StepMetrics) -> None:
        """Add the next step."""
        if metrics.train_loss is not None:
            self._losses.append((metrics.global_step, metrics.train_loss))

    def loss_limit(self, step: int) -> float:
        """Return the loss in nats above which this step is a spike; infinity early in a run. It
        ignores the unread previous step, so resumed and uninterrupted runs have the same limits."""
        last = step - 1 - _UNREAD_STEPS
        losses = [loss for at, loss in self._losses if last - WINDOW_STEPS < at <= last]
        if len(losses) < MIN_STEPS:
            return math.inf
        median = float(np.median(losses))
        deviation = DEVIATIONS_PER_MAD * float(np.median(np.abs(np.subtract(losses, median))))
        return max(median + DEVIATIONS * deviation, MIN_FACTOR * median, median + MIN_RISE)


class FailedStepMeta(strict_json.StrictModel):
    """The content of `step.json`."""

    global_step: int
    total_steps: int
    bad: dict[int, str]
    """The first non-finite tensor, by the number of the dropped microbatch."""
    skipped_steps: list[int]
    """Steps since the checkpoint that were skipped because of a loss spike."""
    model: dict[str, Any]
    train: dict[str, Any]
    sharding: ShardingConfig
    """The mesh and sharding mode it was trained on."""
    batch_sha256: str


class FailedStep(NamedTuple):
    """A failed step read from disk."""

    folder: Path
    meta: FailedStepMeta
    config: AnyRunConfig
    batch: dict[str, np.ndarray]
    """Arrays by name, with the axes A, B and S."""
    checkpoint: Checkpoint | None


class FailedSteps:
    """Tracks non-finite values in the steps of a start: saves failed steps, in the first process,
    and ends a run that cannot continue, after `max_non_finite_steps` failed steps in a row.
    `before` are the steps before this start, in order; saving a failed step waits for a pending
    save of `saver`."""

    def __init__(
        self,
        start: Start,
        length: RunLength,
        learner: Learner[Any],
        saver: Saver,
        sharding: ShardingConfig,
        before: Sequence[StepRecord],
    ) -> None:
        self._run, self._config, self._length = start.run, start.config, length
        self._learner, self._saver, self._sharding = learner, saver, sharding
        self._names = checked_names(learner.model, learner.optimizer.wrt)
        lost = itertools.takewhile(lambda step: step.train_loss is None, reversed(before))
        self._in_a_row = len(list(lost))
        self._skipped_steps: list[int] = []

    def note(self, step: int, result: StepResult) -> None:
        """Process the result of a step; warn of dropped microbatches."""
        self._in_a_row = 0 if result.loss is not None else self._in_a_row + 1
        if result.skipped and result.trained_loss is not None:
            self._skipped_steps.append(step)
        if bad := result.nonfinite(self._names):
            replay = self.record(step, bad)
            log.warning(
                "step %d: %d of %d microbatches dropped: %s is not finite; %s",
                *(step, len(bad), len(result.first_nonfinite_A), describe_first(bad), replay),
            )

    def check_step(self, step: int) -> None:
        """Raise RunFailure if the run cannot continue after a step without a finite microbatch: a
        parameter is not finite, or too many steps in a row failed."""
        self.check_state(step, finite_flags(named_arrays(self._learner.model)))
        limit = self._config.train.max_non_finite_steps
        if limit != NEVER and self._in_a_row >= limit:
            raise RunFailure(
                f"step {step}: no finite loss and gradient in {self._in_a_row} steps in a row;"
                " training stopped, with weights and optimizer state unchanged by them. The failed"
                " steps are in failed-steps/ (see --replay); --from goes back to an earlier"
                " checkpoint. A lower learning_rate or a longer warm-up often helps"
            )

    def check_state(self, step: int, flags: Flags) -> None:
        """Raise RunFailure if a parameter or optimizer moment is not finite."""
        if names := nonfinite_names(flags):
            replay = self.record(step, {})
            others = f" and {len(names) - 1} more" * (len(names) > 1)
            raise RunFailure(
                f"step {step}: {names[0]}{others} not finite; training stopped without saving: the"
                f" same command resumes from the newest checkpoint; {replay}"
            )

    def record(self, step: int, bad: dict[int, str]) -> str:
        """Save a failed step, unless it exists or there are enough. Return the end of a log
        message: how to replay it, or why it was not saved. `bad` has the first non-finite tensor by
        dropped microbatch."""
        self._saver.wait()  # it may be saving the newest checkpoint or deleting an old one
        folder = self._run.failed_steps / f"step-{step:06d}"
        if not processes.is_first_process():
            return "process 0 logs where the step is saved"
        saved = list(self._run.failed_steps.glob("step-*"))
        if len(saved) >= MAX_FAILED_STEPS and not folder.exists():
            return f"not saved for replay: there are {MAX_FAILED_STEPS} failed steps already"
        try:
            if not folder.exists():
                self._write(folder, step, bad)
        except (UserError, RunFailure) as error:  # training continues without it
            return f"not saved for replay: {error}"
        replay = f"{self._config.command_again} {shown_text.quoted(self._run.path)}"
        return f"to replay it: {replay} --replay {folder.name}"

    def _write(self, folder: Path, step: int, bad: dict[int, str]) -> None:
        earlier = [c for c in list_checkpoints(self._run.checkpoints) if c.step < step]
        saved = earlier[-1] if earlier else None
        skipped = [at for at in self._skipped_steps if saved is None or at > saved.step]
        batch = save(dict(self._learner.batch(step)))
        meta = FailedStepMeta(
            global_step=step,
            total_steps=self._length.total_steps,
            bad=bad,
            skipped_steps=skipped,
            model=self._config.model.as_json(),
            train=self._config.train.as_json(),
            sharding=self._sharding,
            batch_sha256=hashlib.sha256(batch).hexdigest(),
        )
        with disk.atomic_folder(folder) as unfinished:
            (unfinished / BATCH_FILE).write_bytes(batch)
            text = meta.model_dump_json(indent=2) + "\n"
            (unfinished / STEP_FILE).write_text(text, encoding="utf-8")
            if saved is not None:
                disk.copy(saved.folder, unfinished / CHECKPOINT_FOLDER, link=True)


def find_failed_step(run: RunFolder, name: str) -> Path | None:
    """Return the folder of a failed step, None if there is none; see `open_failed_step`."""
    places = Path(name), run.failed_steps / name
    return next((place for place in places if place.is_dir()), None)


def open_failed_step(run: RunFolder, name: str) -> FailedStep:
    """Read a failed step of a run by its folder name, such as `step-000123`, or a path. Raises
    UserError if it does not exist or is damaged."""
    folder = find_failed_step(run, name)
    if folder is None:
        known = sorted(path.name for path in run.failed_steps.glob("step-*"))
        raise UserError(
            f"--replay {name}: no such failed step in {run.failed_steps};"
            f" there are {', '.join(known) or 'none'}"
        )
    path, file = folder / STEP_FILE, folder / BATCH_FILE
    try:
        meta = FailedStepMeta.model_validate_json(strict_json.read_text(path))
    except ValidationError:
        raise UserError(f"{path}: damaged, or of another version of Rungs") from None
    checkpoint = None
    if (folder / CHECKPOINT_FOLDER).exists():
        checkpoint = read_checkpoint(folder / CHECKPOINT_FOLDER)
        if damage := checkpoint.damage():
            raise UserError(f"{checkpoint.folder}: damaged ({', '.join(damage)})")
        checkpoint.weights.refuse_changed_base()
    if meta.batch_sha256 != paths.file_checksum(file):
        raise UserError(f"{file}: damaged")
    return FailedStep(folder, meta, run_config(meta.model, meta.train), load_file(file), checkpoint)

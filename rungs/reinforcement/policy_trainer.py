"""The loop of reinforcement learning: sample, verify, update, validate, save.

Beside `rungs/training/trainer.py`; the compiled update is `rungs/step/policy_step.py`.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from rungs.checkpointing.checkpoint_folder import utc_now
from rungs.checkpointing.manifest import CheckpointMeta, installed_versions
from rungs.checkpointing.saver import Saver
from rungs.common.errors import RunFailure
from rungs.common.signals import StopSignal
from rungs.config.run_config import ReinforceRunConfig
from rungs.model.gpt import GPT
from rungs.model.rollouts import RolloutSampler
from rungs.optim.multi_steps import MultiSteps
from rungs.parallel import numerics
from rungs.parallel.devices import recorded_sharding
from rungs.parallel.processes import AnyProcess
from rungs.reinforcement.policy_update import PolicyUpdater, Updated
from rungs.reinforcement.prompts import Prompt, Prompts
from rungs.reinforcement.rollout_files import Completion, RolloutFiles
from rungs.reinforcement.sampling import CompletionSource, Seconds
from rungs.reinforcement.step_metrics import policy_metrics
from rungs.reinforcement.validation import summarize
from rungs.reinforcement.verification import Stopped
from rungs.run.metrics import MetricsLog, PolicyMetrics, Validation
from rungs.step.nonfinite import Flags, checked_names, describe_first, nonfinite_names
from rungs.training.progress import Progress

log = logging.getLogger("rungs")

_MANY_WRONG_STEPS = 5

ShouldStop = Callable[[], bool]


class TaskRecord(NamedTuple):
    """What checkpoints record about the tasks and the tokenizer."""

    checksums: dict[str, dict[str, str]]
    """By task and part, as `CheckpointMeta.datasets`."""
    tokenizer: str


class Replayed(NamedTuple):
    """A step that was not recorded."""

    completions: list[Completion]
    """With their advantages."""
    gradient_norm: float
    seconds: Seconds
    updating_seconds: float


@dataclasses.dataclass
class PolicyTrainer:
    """Takes a run's steps, from `first_step` to the last one of the config."""

    config: ReinforceRunConfig
    record: TaskRecord
    prompts: Prompts
    source: CompletionSource
    sampler: RolloutSampler
    updater: PolicyUpdater
    mesh: Mesh
    model: GPT
    optimizer: MultiSteps
    first_step: int
    metrics: MetricsLog[PolicyMetrics]
    saver: Saver
    files: RolloutFiles
    after_validation: Callable[[int], None]
    """Called with the step."""
    tokens_seen: int
    """Sampled before `first_step`."""
    unvalidated: PolicyMetrics | None
    """The step before `first_step`, if a signal interrupted its validation."""

    def __post_init__(self) -> None:
        self._saved: tuple[int, Flags] | None = None
        self._suspects = checked_names(self.model, self.optimizer.wrt)
        self._failed_steps = 0
        self._wrong_steps = 0
        self._latest: PolicyMetrics | None = None
        self._last_end = time.perf_counter()

    def train(self, stop: StopSignal) -> PolicyMetrics | None:
        """Take the remaining steps, or those until `stop`; the last one is saved.

        A signal during sampling or verifying abandons that step, which the next start repeats.

        Returns:
            The metrics of the last step taken, None if there is none.
        """
        any_process = AnyProcess(self.mesh)

        def should_stop() -> bool:
            return any_process(stop.number is not None)

        steps = range(self.first_step, self.config.train.steps)
        with Progress(steps, headline) as progress, self.metrics, self.saver:
            if self.unvalidated is not None:
                self._validate_late(self.unvalidated)
            for step in steps:
                try:
                    metrics = self._take(step, lambda: stop.number is not None, should_stop)
                except Stopped:
                    self._save_latest()
                    break
                stop.begin()
                progress.show(metrics)
                if should_stop():
                    self._save_latest()
                    break
                self.saver.raise_failure()
            self._check_saved_state()
        return self._latest

    def _take(self, step: int, is_stopping: ShouldStop, should_stop: ShouldStop) -> PolicyMetrics:
        """Take one step and record it; raises Stopped if it is abandoned.

        Args:
            is_stopping: what this process knows.
            should_stop: what all processes agree on.
        """
        start = self._start_validation(step, is_stopping)
        prompts = self.prompts.of_step(step)
        file = self.files.step(step)
        completions, seconds = self.source.of_step(
            step, prompts, self.config.train.samples_per_prompt, file, is_stopping
        )
        if should_stop():
            raise Stopped
        updated = self._update(step, prompts, completions)
        self.files.write(file, updated.completions)
        metrics = self._metrics(step, updated, seconds, start)
        self._warn_of_wrong_steps(metrics)
        self.sampler.refresh(self.model)
        self.tokens_seen = metrics.tokens_seen
        if self._is_due(step):
            metrics = self._finish_due_step(metrics, is_stopping)
        else:
            self.metrics.append(metrics)
        self._latest = metrics
        return metrics

    def replay(self, step: int) -> Replayed:
        """Take one step and record nothing."""
        prompts, samples = self.prompts.of_step(step), self.config.train.samples_per_prompt
        nothing = self.files.step(step).with_suffix(".absent")
        completions, seconds = self.source.of_step(step, prompts, samples, nothing, _never)
        updated = self._update(step, prompts, completions)
        self.sampler.refresh(self.model)
        norm = float(updated.last.step.gradient_norm)
        return Replayed(updated.completions, norm, seconds, updated.seconds)

    def _update(self, step: int, prompts: list[Prompt], completions: list[Completion]) -> Updated:
        _report_failures(step, completions)
        samples = self.config.train.samples_per_prompt
        tokens = [prompt.tokens for prompt in prompts for _ in range(samples)]
        updated = self.updater.update(self.model, self.optimizer, tokens, completions)
        self._check_saved_state()
        return updated

    def _metrics(
        self, step: int, updated: Updated, seconds: Seconds, start: Validation | None
    ) -> PolicyMetrics:
        dropped = self._warn_of_dropped(step, updated)
        now = time.perf_counter()
        whole, self._last_end = now - self._last_end, now
        return policy_metrics(
            step,
            updated,
            self.config.train,
            tokens_before=self.tokens_seen,
            dropped_microbatches=dropped,
            step_seconds=whole,
            seconds=seconds,
            start_validation=start,
            resumed=step == self.first_step > 0 or None,
        )

    def _warn_of_dropped(self, step: int, updated: Updated) -> int:
        """Return how many microbatches were left out of the last update; raise RunFailure if the
        run cannot continue."""
        result = updated.last.step
        bad = result.nonfinite(self._suspects)
        self._failed_steps = 0 if result.finite_A.any() else self._failed_steps + 1
        if bad:
            log.warning(
                "step %d: %d of %d microbatches dropped: %s is not finite; to look into it:"
                " --replay step-%06d",
                *(step, len(bad), len(result.finite_A), describe_first(bad), step),
            )
        if self._failed_steps >= self.config.train.max_non_finite_steps:
            raise RunFailure(
                f"step {step}: {self._failed_steps} steps in a row without a finite microbatch;"
                " training stopped: the same command resumes from the newest checkpoint"
            )
        return len(bad)

    def _warn_of_wrong_steps(self, metrics: PolicyMetrics) -> None:
        self._wrong_steps = 0 if metrics.correct else self._wrong_steps + 1
        if self._wrong_steps == _MANY_WRONG_STEPS:
            log.warning(
                "%d steps in a row without a correct completion, so nothing to learn from; try"
                " easier items, supervised pretraining, more samples or a higher temperature",
                _MANY_WRONG_STEPS,
            )

    def _start_validation(self, step: int, is_stopping: ShouldStop) -> Validation | None:
        """Validate the weights that the run starts from, if this is its first step."""
        return self._validate(None, is_stopping) if step == 0 else None

    def _validate(self, step: int | None, is_stopping: ShouldStop) -> Validation:
        """Validate the weights after a step; None: before the first. Raises Stopped."""
        samples, file = self.config.train.validation_samples, self.files.validation(step)
        completions, _ = self.source.of_validation(
            self.prompts.of_validation(), samples, file, is_stopping
        )
        self.files.write(file, completions)
        return summarize(completions, samples)

    def _is_due(self, step: int) -> bool:
        last = self.config.train.steps - 1
        return step % self.config.train.checkpoint_interval == 0 or step == last

    def _finish_due_step(self, metrics: PolicyMetrics, is_stopping: ShouldStop) -> PolicyMetrics:
        """Validate, record and save a step. An interrupted validation is repeated by the next
        start; as none follows the last step, its validation is never interrupted."""
        step = metrics.global_step
        is_last = step == self.config.train.steps - 1
        try:
            validation = self._validate(step, _never if is_last else is_stopping)
            metrics = dataclasses.replace(metrics, validation=validation)
        except Stopped:
            pass
        self.metrics.append(metrics)
        self._save(metrics)
        self.after_validation(step)
        return metrics

    def _validate_late(self, metrics: PolicyMetrics) -> None:
        """Validate a step that was saved without, and save it again with it."""
        validation = self._validate(metrics.global_step, _never)
        metrics = dataclasses.replace(metrics, validation=validation)
        self.metrics.replace_last(metrics)
        self._save(metrics)

    def _save_latest(self) -> None:
        """Save the last step taken by this start, unless it was saved already."""
        if self._latest is not None and not self._is_due(self._latest.global_step):
            self._save(self._latest)

    def _save(self, metrics: PolicyMetrics) -> None:
        self._check_saved_state()
        flags = self.saver.save(self.model, self.optimizer, self._meta(metrics))
        self._saved = metrics.global_step, flags

    def _check_saved_state(self) -> None:
        """Raise RunFailure if an array of the last checkpoint was not finite."""
        if self._saved is not None:
            step, flags = self._saved
            self._saved = None
            if names := nonfinite_names(flags):
                raise RunFailure(
                    f"step {step}: {names[0]} not finite; training stopped without saving: the same"
                    " command resumes from the newest checkpoint"
                )

    def _meta(self, metrics: PolicyMetrics) -> CheckpointMeta:
        validation = metrics.validation
        return CheckpointMeta(
            global_step=metrics.global_step,
            total_steps=self.config.train.steps,
            tokens_seen=metrics.tokens_seen,
            train_loss=metrics.train_loss,
            validation_loss=None,
            selection_loss=1 - validation.pass_at_1 if validation else None,
            model=self.config.model.as_json(),
            train=self.config.train.as_json(),
            datasets=self.record.checksums,
            tokenizer=self.record.tokenizer,
            sharding=recorded_sharding(self.config.train, self.mesh),
            created=utc_now().isoformat(),
            versions=installed_versions(),
            environment=numerics.recorded(),
            checksums={},
        )


def headline(steps: Sequence[PolicyMetrics]) -> dict[str, str]:
    """Return what the progress line says of some steps."""
    shown = {"reward": f"{np.nanmean([step.reward for step in steps]):.3f}"}
    shown["correct"] = f"{np.nanmean([step.correct for step in steps]):.1%}"
    for step in steps:
        if step.validation is not None:
            shown["pass@1"] = f"{step.validation.pass_at_1:.1%}"
    return shown


def _report_failures(step: int, completions: list[Completion]) -> None:
    """Log that the verifier failed; raise RunFailure if it always did."""
    failed = [completion for completion in completions if completion.status != "ok"]
    if not failed:
        return
    line = (
        f"step {step}: the verifier failed on {len(failed):,} of {len(completions):,} completions,"
        f" which are left out; the first: {failed[0].message}"
    )
    if len(failed) == len(completions):
        raise RunFailure(f"{line}; nothing is left to learn from, so training stops here")
    log.warning("%s", line)


def _never() -> bool:
    return False

"""What `train.log` and the terminal say of a run of reinforcement learning."""

import logging
from collections.abc import Sequence

from jax.sharding import Mesh

from rungs.checkpointing.manifest import Checkpoint
from rungs.checkpointing.weights_file import Weights
from rungs.common.shown_text import quoted
from rungs.common.text_table import counted
from rungs.config.run_config import ReinforceRunConfig
from rungs.config.unused_keys import unused_keys
from rungs.parallel.devices import recorded_sharding
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.run.metrics import PolicyMetrics, Validation
from rungs.tasks.task import Task
from rungs.tasks.verifiers.checkup import Checkup
from rungs.tasks.verifiers.opening import Verifier
from rungs.training.run_report import describe_devices

log = logging.getLogger("rungs")


def log_checkups(
    tasks: Sequence[Task], verifiers: Sequence[Verifier], checkups: Sequence[Checkup]
) -> None:
    """Log what the checkups of the verifiers found."""
    for task, verifier, checkup in zip(tasks, verifiers, checkups, strict=True):
        _log_checkup(task, verifier, checkup)


def _log_checkup(task: Task, verifier: Verifier, checkup: Checkup) -> None:
    paid = [f"{kind} for {count}" for kind, count in checkup.paid.items() if count]
    log.info(
        "task %s: the verifier %s pays right answers most, on %d items, in %.2g s each%s",
        task.name,
        verifier.name,
        checkup.items,
        checkup.median_seconds,
        f"; by accident, it paid {', '.join(paid)}" if paid else "",
    )


def log_start(
    run: RunFolder,
    config: ReinforceRunConfig,
    saved: Checkpoint | None,
    weights: Weights,
    mesh: Mesh,
    texts: str,
) -> None:
    """Log where the run begins, how long it is and what it runs on.

    Args:
        texts: what begins prompts and ends completions.
    """
    train = config.train
    begins = (
        f"resumes after step {saved.step:,}, {saved.folder.name}"
        if saved
        else f"starts from {weights.path}"
    )
    log.info(
        "%s %s: %s of %s × %s of at most %s on %s, in %s; %s",
        run.path,
        begins,
        counted(train.steps, "step"),
        counted(train.prompts_per_step, "prompt"),
        counted(train.samples_per_prompt, "completion"),
        counted(train.max_new_tokens, "token"),
        describe_devices(recorded_sharding(train, mesh)),
        train.compute_dtype,
        texts,
    )


def warn_of_unused_keys(run: RunFolder, config: ReinforceRunConfig) -> None:
    """Log a warning for each key that a file sets although it has no effect."""
    for line in unused_keys(config):
        log.warning("%s/%s", run.path, line)


def log_end(run: RunFolder, last: PolicyMetrics | None, is_stopped: bool) -> None:
    """Log what the run has come to.

    Args:
        last: the last step taken by this start, None if it took none.
    """
    steps = list(metrics.stream(run.metrics, PolicyMetrics))
    last = last or next(reversed(steps), None)
    start = next((step.start_validation for step in steps if step.start_validation), None)
    validated = [(step.validation.pass_at_1, step) for step in steps if step.validation]
    best = max(validated, key=lambda pair: pair[0], default=None)
    log.info(
        "%s after step %s: %s tokens sampled in %s s; pass@1 at the start %s, now %s, best %s",
        "stopped" if is_stopped else "finished",
        f"{last.global_step:,}" if last else "none",
        f"{last.tokens_seen:,}" if last else "0",
        f"{sum(step.step_seconds for step in steps):,.1f}",
        _pass_at_1(start),
        _pass_at_1(last.validation if last else None),
        f"{best[0]:.1%} at step {best[1].global_step:,}" if best else "none",
    )
    if is_stopped:
        log.info("to resume: uv run reinforce.py %s", quoted(run.path))


def log_finished(run: RunFolder, steps: int) -> None:
    """Log that there is nothing left to do."""
    log.info(
        "%s is finished: %s steps; to train longer, set more steps in reinforce.json and add"
        " --extend",
        run.path,
        f"{steps:,}",
    )


def _pass_at_1(validation: Validation | None) -> str:
    if validation is None:
        return "not measured"
    low, high = validation.pass_at_1_interval
    return f"{validation.pass_at_1:.1%} ({low:.1%} to {high:.1%})"

"""Rerun a recorded step, and compare its texts, rewards and gradient with the record."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import click
from jax.sharding import Mesh

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import Checkpoint
from rungs.common.errors import UserError
from rungs.common.shown_text import counted
from rungs.config.run_config import ReinforceRunConfig
from rungs.reinforcement.policy_learner import PolicyLearner
from rungs.reinforcement.rollout_files import Completion, RolloutFiles, read
from rungs.run import metrics
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.learner import Kind
from rungs.training.start import create_mesh, start_of, with_device_choices

_COMPARED = ("tokens", "log_probs", "finished", "rewards", "status", "advantage")
"""Fields that must be equal, in this order."""


def replay(run: RunFolder, config: ReinforceRunConfig, name: str, kind: Kind) -> int:
    """Rerun a step, such as `step-000123`, from the newest earlier checkpoint, and print the first
    difference. Return the exit code: 1 if something differs, otherwise 0. Raises UserError if the
    step has no record, or the run's tasks have changed."""
    prefix, _, digits = name.rpartition("-")
    if prefix not in ("", "step") or not digits.isdecimal():
        raise UserError(f"--replay {name}: must be a step, such as step-000123")
    step = int(digits)
    recorded = read(RolloutFiles(run.rollouts).step(step))
    lines = metrics.stream(run.metrics, metrics.PolicyMetrics)
    before = next((line for line in lines if line.global_step == step), None)
    if before is None:
        raise UserError(f"{run.metrics}: has no line of step {step}")
    # texts that were sampled ahead of a checkpoint can't be sampled again from it
    first = step - config.train.staleness
    earlier = [saved for saved in list_checkpoints(run.checkpoints) if saved.step < first]
    saved = next((saved for saved in reversed(earlier) if not saved.damage()), None)
    if saved:
        saved.weights.refuse_changed_base()
    with ExitStack() as stack:
        learner, first = open_learner(stack, run, config, saved, kind)
        click.echo(
            f"step {step}, from {saved.folder if saved else 'the start'}:"
            f" {counted(step - first, 'step')} retrained"
        )
        for number in range(first, step):
            learner.retake(number)
        again = learner.retake(step, is_last=True)
    for difference in _differences(recorded, again.completions):
        click.echo(difference)
        return 1
    norm = float(again.updated.last.step.gradient_norm)
    now = norm if math.isfinite(norm) else None  # as recorded
    if now != before.gradient_norm:
        click.echo(f"gradient norm: was {before.gradient_norm!r}, is now {now!r}")
        return 1
    click.echo(
        f"the same {len(recorded):,} texts, log-probabilities and rewards, and the same gradient"
        f" norm, {norm:.6g}"
    )
    return 0


def open_learner(
    stack: ExitStack,
    run: RunFolder,
    config: ReinforceRunConfig,
    saved: Checkpoint | None,
    kind: Kind,
    mesh: Mesh | None = None,
) -> tuple[PolicyLearner, int]:
    """Return a learner that continues from a checkpoint or the start, and its first step. `mesh` is
    the run's by default. Raises UserError if run, tasks and checkpoints don't fit together."""
    options = StartOptions(extend=True, fresh=saved is None)  # the checkpoints stay where they are
    start = start_of(run, config, options, saved)
    inputs = kind.open_inputs(start, stack)
    mesh = mesh or create_mesh(start)
    start = with_device_choices(start)
    learner = inputs.learner(start, mesh, ())
    assert isinstance(learner, PolicyLearner)
    return learner, start.first_step


def _differences(
    recorded: Sequence[Completion], completions: Sequence[Completion]
) -> Iterator[str]:
    if len(recorded) != len(completions):
        yield f"completions: were {len(recorded)}, are now {len(completions)}"
    for field in _COMPARED:
        for old, new in zip(recorded, completions, strict=False):
            was, now = getattr(old, field), getattr(new, field)
            if repr(was) != repr(now):  # unlike NaN, its text equals itself
                yield (
                    f"{field} of prompt {old.place}, sample {old.sample}: was {was!r},"
                    f" is now {now!r}"
                )

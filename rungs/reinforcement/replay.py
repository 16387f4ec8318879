"""Run a recorded step again, and compare its texts, rewards and gradient with those recorded."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import click

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checkpointing.manifest import Checkpoint
from rungs.common.errors import UserError
from rungs.common.text_table import counted
from rungs.config.run_config import ReinforceRunConfig
from rungs.reinforcement.rollout_files import Completion, RolloutFiles, read
from rungs.reinforcement.start import open_to_replay
from rungs.run import metrics
from rungs.run.folder import RunFolder
from rungs.run.metrics import PolicyMetrics

_COMPARED = ("tokens", "log_probs", "finished", "rewards", "status", "advantage")
"""What must be equal, in this order."""


def replay(run: RunFolder, config: ReinforceRunConfig, name: str, trust_verifier: bool) -> int:
    """Run a step again from the newest checkpoint before it, and print the first difference.

    Args:
        name: the step, such as `step-000123`.
        trust_verifier: whether a Python file that a task names may run.

    Returns:
        The exit code: 1 if something differs, otherwise 0.

    Raises:
        UserError: nothing is recorded of the step, or the run's tasks have changed.
    """
    step = _number(name)
    recorded = read(RolloutFiles(run.rollouts).step(step))
    before = _metrics_of(run, step)
    saved = _checkpoint_before(run, step)
    with ExitStack() as stack:
        trainer = open_to_replay(stack, run, config, saved, trust_verifier)
        click.echo(
            f"step {step}, from {saved.folder if saved else 'the start'}:"
            f" {counted(step - trainer.first_step, 'step')} retrained"
        )
        for number in range(trainer.first_step, step):
            trainer.replay(number)
        again = trainer.replay(step)
    for difference in _differences(recorded, again.completions):
        click.echo(difference)
        return 1
    now = again.gradient_norm if math.isfinite(again.gradient_norm) else None  # as recorded
    if now != before.gradient_norm:
        click.echo(f"gradient norm: was {before.gradient_norm!r}, is now {now!r}")
        return 1
    click.echo(
        f"the same {len(recorded):,} texts, log-probabilities and rewards, and the same gradient"
        f" norm, {again.gradient_norm:.6g}"
    )
    return 0


def _number(name: str) -> int:
    prefix, _, digits = name.rpartition("-")
    if prefix not in ("", "step") or not digits.isdecimal():
        raise UserError(f"--replay {name}: must be a step, such as step-000123")
    return int(digits)


def _metrics_of(run: RunFolder, step: int) -> PolicyMetrics:
    for line in metrics.stream(run.metrics, PolicyMetrics):
        if line.global_step == step:
            return line
    raise UserError(f"{run.metrics}: has no line of step {step}")


def _checkpoint_before(run: RunFolder, step: int) -> Checkpoint | None:
    """Return the newest valid checkpoint of an earlier step, None if there is none."""
    earlier = [saved for saved in list_checkpoints(run.checkpoints) if saved.step < step]
    return next((saved for saved in reversed(earlier) if not saved.damage()), None)


def _differences(
    recorded: Sequence[Completion], completions: Sequence[Completion]
) -> Iterator[str]:
    """Yield a line for each difference, in the order of the completions."""
    if len(recorded) != len(completions):
        yield f"completions: were {len(recorded)}, are now {len(completions)}"
    for field in _COMPARED:
        for old, new in zip(recorded, completions, strict=False):
            was, now = getattr(old, field), getattr(new, field)
            if repr(was) != repr(now):  # unlike its number, the text of NaN equals itself
                yield (
                    f"{field} of prompt {old.place}, sample {old.sample}: was {was!r},"
                    f" is now {now!r}"
                )

"""Train a run by reinforcement learning or resume it, replay a step, or audit its completions."""

from rungs.common.command import importing

import sys
from typing import TYPE_CHECKING, Any

import click

from rungs.commands.start_command import StartCommand, hold_run
from rungs.common.errors import UserError
from rungs.common.shown_text import quoted
from rungs.config.run_config import ReinforceRunConfig, load_reinforcement_run
from rungs.run.folder import RunFolder, find_run

if TYPE_CHECKING:
    from rungs.training.learner import Kind


def reinforce(trust_verifier: bool, is_audit: bool, **start: Any) -> None:
    """Do what the options of `reinforce.py` ask for, and end the process with the run's exit code.
    `start` holds the options of `start_options`."""
    command = StartCommand(**start)
    command.begin()
    run = command.given_run
    if command.dry_run:
        raise UserError(
            "--dry-run: not with reinforcement learning; what the run will take:"
            f" uv run plan.py {quoted(run)}"
        )
    if is_audit:
        if command.starts_run or command.replay or trust_verifier:
            raise UserError("--audit: only reads what is there; it goes with no other option")
        from rungs.reinforcement.audit import audit

        click.echo(audit(RunFolder(find_run(run))))
        return
    with command.open_run() as path:
        sys.exit(_reinforce(RunFolder(path), command, trust_verifier))


def _reinforce(run: RunFolder, command: StartCommand, trust_verifier: bool) -> int:
    config = load_reinforcement_run(run.path)
    with hold_run(run, config, command.cluster) as own:
        # JAX takes seconds to import; config errors are reported first.
        with importing():
            from rungs.reinforcement.policy_learner import reinforcement
            from rungs.training.start import launch
        kind = reinforcement(trust_verifier)
        if command.replay:
            return _replay(own, config, command.replay, kind)
        return launch(own, config, command.start, kind)


def _replay(run: RunFolder, config: ReinforceRunConfig, name: str, kind: "Kind") -> int:
    """Look for non-finite values in a failed step; compare any other step with its record."""
    from rungs.reinforcement.rerun import replay
    from rungs.training.failed_steps import find_failed_step
    from rungs.training.replay import replay as replay_failed

    if find_failed_step(run, name):
        return replay_failed(run, name, kind)
    return replay(run, config, name, kind)

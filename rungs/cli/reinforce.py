"""Train a run by reinforcement learning or resume it, replay a step, or audit its completions."""

from rungs.common.command import importing

import sys
from typing import Any

import click

from rungs.cli.options import start_options
from rungs.common.errors import UserError
from rungs.common.shown_text import command_line, quoted


@click.command()
@start_options(
    extended="steps",
    replayed="Run a step (`step-000123`) again and compare its texts, rewards and gradient with"
    " those recorded; name the first that differs. For a failed step, name the first tensor that is"
    " not finite.",
    has_dry_run=False,
)
@click.option(
    "--trust-verifier",
    is_flag=True,
    help="Allow the Python files that a task names as its verifier, environment or tools, the"
    " environments of libraries, and the tool python, to run. Read them first.",
)
@click.option(
    "--audit",
    "is_audit",
    is_flag=True,
    help="Start nothing; print what the texts sampled so far were paid for, and what looks wrong.",
)
@click.option(
    "--check-environment",
    "checks_environment",
    is_flag=True,
    help="Start nothing; say the same to environments and tools twice, and show what differs or"
    " fails.",
)
def main(trust_verifier: bool, is_audit: bool, checks_environment: bool, **start: Any) -> None:
    """Train RUN, a folder with model.json and reinforce.json, by reinforcement learning from
    verifiable rewards, or resume it."""
    with importing():
        from rungs.cli.start_command import StartCommand, hold_run
        from rungs.config.run_config import load_reinforcement_run
        from rungs.run.folder import RunFolder, find_run

    command = StartCommand(**start)
    command.begin()
    run = command.given_run
    if command.dry_run:
        raise UserError(
            "--dry-run: not with reinforcement learning; what the run will take:"
            f" {command_line('plan')} {quoted(run)}"
        )
    if checks_environment and (command.starts_run or command.replay or is_audit):
        raise UserError("--check-environment: goes only with --trust-verifier")
    if is_audit:
        if command.starts_run or command.replay or trust_verifier:
            raise UserError("--audit: only reads what is there; it goes with no other option")
        from rungs.reinforcement.audit import audit

        click.echo(audit(RunFolder(find_run(run))))
        return
    with command.open_run() as path:
        config = load_reinforcement_run(path)
        with hold_run(RunFolder(path), config, command.cluster) as own:
            # JAX takes seconds to import; config errors are reported first.
            with importing():
                from rungs.reinforcement import rerun
                from rungs.reinforcement.policy_learner import reinforcement
                from rungs.training import replay
                from rungs.training.failed_steps import find_failed_step
                from rungs.training.start import launch

            kind = reinforcement(trust_verifier)
            if checks_environment:
                from rungs.reinforcement.environment_check import check_environment

                text, code = check_environment(own, config, kind)
                click.echo(text)
            elif not command.replay:
                code = launch(own, config, command.start, kind)
            elif find_failed_step(own, command.replay):
                code = replay.replay(own, command.replay, kind)
            else:
                code = rerun.replay(own, config, command.replay, kind)
        sys.exit(code)

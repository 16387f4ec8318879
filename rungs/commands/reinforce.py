"""Train a run by reinforcement learning or resume it, replay a step, or audit what was sampled."""

import sys
from typing import Any

import click

from rungs.commands.start_command import StartCommand, hold_run
from rungs.common.errors import UserError
from rungs.common.imports import importing
from rungs.common.shown_text import quoted
from rungs.config.run_config import load_reinforcement_run
from rungs.run.folder import RunFolder, find_run


def reinforce(trust_verifier: bool, is_audit: bool, **start: Any) -> None:
    """Do what the options of `reinforce.py` ask for; `start` has the ones in `start_options`. The
    process ends with the run's exit code."""
    command = StartCommand(**start)
    command.log_to_terminal()
    command.check()
    if command.supervise:
        sys.exit(command.run_supervised())
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
        # JAX takes seconds to import; config errors are reported before that.
        with importing():
            from rungs.reinforcement.start import launch
        if command.replay:
            from rungs.reinforcement.replay import replay

            return replay(own, config, command.replay, trust_verifier)
        return launch(own, config, command.start, trust_verifier)

"""Train a run by reinforcement learning, or resume it: `uv run reinforce.py runs/parity-rl`.

Exit codes: 0 finished; 2 bad input, nothing was changed; 130, 143 and 129 stopped by SIGINT
(Ctrl-C), SIGTERM and SIGHUP, saved if a step had been taken; 1 anything else.
"""

from rungs.common import signals

if __name__ == "__main__":
    signals.exit_on_signal()  # before the slow imports

from rungs.common.command import run_command

import sys

import click

from rungs.common.errors import UserError
from rungs.config.run_config import load_reinforcement_run
from rungs.run.folder import RunFolder, find_run
from rungs.training.options import StartCommand, hold_run, start_options


@click.command()
@start_options(
    extended="steps",
    replayed="Run a step (`step-000123`) again and compare its texts, rewards and gradient with"
    " those recorded; name the first that differs.",
)
@click.option(
    "--trust-verifier",
    is_flag=True,
    help="Allow the Python file that a task names as its verifier to run. Read it first.",
)
@click.option(
    "--audit",
    "is_audit",
    is_flag=True,
    help="Start nothing; print what the texts sampled so far were paid for, and what looks wrong.",
)
def main(command: StartCommand, trust_verifier: bool, is_audit: bool) -> None:
    """Train RUN, a folder with model.json and reinforce.json, by reinforcement learning from
    verifiable rewards, or resume it."""
    command.require_run()
    if command.start.dry_run:
        raise UserError(
            "--dry-run: not with reinforcement learning; what the run will take:"
            f" uv run plan.py {command.run}"
        )
    if is_audit:
        if command.starts_run or command.replay or trust_verifier:
            raise UserError("--audit: only reads what is there; it goes with no other option")
        from rungs.reinforcement.audit import audit

        click.echo(audit(RunFolder(find_run(command.run))))
        return
    with command.open_run() as path:
        sys.exit(_reinforce(RunFolder(path), command, trust_verifier))


def _reinforce(run: RunFolder, command: StartCommand, trust_verifier: bool) -> int:
    config = load_reinforcement_run(run.path)
    with hold_run(run, config, command.cluster):
        # JAX takes seconds to import; config errors are reported before that.
        from rungs.reinforcement.start import launch

        if command.replay:
            from rungs.reinforcement.replay import replay

            return replay(run, config, command.replay, trust_verifier)
        return launch(run, config, command.start, trust_verifier)


if __name__ == "__main__":
    run_command(main)

"""Train a run by reinforcement learning, or resume it: `uv run reinforce.py runs/parity-rl`.

Exit codes: 0 finished; 2 bad input, nothing was changed; 128 + the number of a signal that
stopped it, saved if a step had been taken: 130 for SIGINT (Ctrl-C), 143 for SIGTERM, 129 for
SIGHUP, 138, 140 and 152 for SIGUSR1, SIGUSR2 and SIGXCPU; 1 anything else.
"""

from rungs.common.command import begin_command, importing, run_command

from rungs.common import signals

if __name__ == "__main__":
    begin_command()
    signals.exit_on_signal()  # before the slow imports

from typing import Any

import click

from rungs.commands.options import start_options


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
    help="Allow the Python file that a task names as its verifier to run. Read it first.",
)
@click.option(
    "--audit",
    "is_audit",
    is_flag=True,
    help="Start nothing; print what the texts sampled so far were paid for, and what looks wrong.",
)
def main(**options: Any) -> None:
    """Train RUN, a folder with model.json and reinforce.json, by reinforcement learning from
    verifiable rewards, or resume it."""
    with importing():
        from rungs.commands.reinforce import reinforce
    reinforce(**options)


if __name__ == "__main__":
    run_command(main)

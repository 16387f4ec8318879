"""The one exception that means «you, the user, can mend this», and how commands report it."""

import sys
from collections.abc import Callable

import click

EXIT_BAD_INPUT = 2
"""Exit code of every command for bad input: a config, an argument, a dataset, a checkpoint."""


class UserError(ValueError):
    """Something the user gave is wrong; each line of the message says what, and what to do."""


def run_command(command: Callable[[], None]) -> None:
    """Run a click command; a `UserError` becomes its message on stderr and exit code 2."""
    try:
        command()
    except UserError as error:
        for line in str(error).splitlines():
            click.echo(f"error: {line}", err=True)
        sys.exit(EXIT_BAD_INPUT)

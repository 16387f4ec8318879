"""The one exception that means «you, the user, can mend this», and how commands report it."""

import sys

import click

EXIT_BAD_INPUT = 2
"""Exit code of every command for bad input: a config, an argument, a dataset, a checkpoint."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C where there was nothing to save."""


class UserError(ValueError):
    """Something the user gave is wrong; each line of the message says what, and what to do."""


def run_command(command: click.Command) -> None:
    """Run a command; a `UserError` becomes its message on stderr and exit code 2, Ctrl-C 130."""
    try:
        command.main(standalone_mode=False)
    except UserError as error:
        for line in str(error).splitlines():
            click.echo(f"error: {line}", err=True)
        sys.exit(EXIT_BAD_INPUT)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)

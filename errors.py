"""What commands report in a line instead of a traceback."""

import sys

import click

EXIT_BAD_INPUT = 2
"""Exit code of every command for bad input: a config, an argument, a dataset, a checkpoint."""
EXIT_FAILED = 1
"""Exit code of a command that could not go on."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C where there was nothing to save."""


class UserError(ValueError):
    """Something the user gave is wrong; each line of the message says what, and what to do."""


class RunFailure(RuntimeError):
    """A run cannot go on, through no mistake in what the user gave: a full disk, weights that are
    not finite; each line of the message says what happened, and what to do."""


def run_command(command: click.Command) -> None:
    """Run a command; a `UserError` becomes its message on stderr and exit code 2, a `RunFailure`
    exit code 1, Ctrl-C 130."""
    try:
        command.main(standalone_mode=False)
    except (UserError, RunFailure) as error:
        for line in str(error).splitlines():
            click.echo(f"error: {line}", err=True)
        sys.exit(EXIT_BAD_INPUT if isinstance(error, UserError) else EXIT_FAILED)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)

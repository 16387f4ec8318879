"""What commands report in a line instead of a traceback."""

import io
import sys

import click

EXIT_BAD_INPUT = 2
"""Exit code of every command for bad input: a config, an argument, a dataset, a checkpoint."""
EXIT_FAILED = 1
"""Exit code of a command that could not go on."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C where there was nothing to save."""
_MOST_LINES, _MOST_CHARACTERS = 100, 600


class UserError(ValueError):
    """Something the user gave is wrong; each line of the message says what, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(_readable(message))


class RunFailure(RuntimeError):
    """A run cannot go on, through no mistake in what the user gave: a full disk, weights that are
    not finite; each line of the message says what happened, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(_readable(message))


def _readable(message: str) -> str:
    """A message as lines that a terminal can show, whatever stood in the files it is about."""
    lines = [_readable_line(line) for line in message.split("\n") if line.strip()]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES - 1 :] = [f"… and {len(lines) - _MOST_LINES + 1:,} more"]
    return "\n".join(lines)


def _readable_line(line: str) -> str:
    if len(line) > _MOST_CHARACTERS:
        half = _MOST_CHARACTERS // 2
        line = f"{line[:half]} … {line[-half:]}"
    escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return "".join(escaped)


def reason(error: Exception) -> str:
    """What a library says is wrong, as one line."""
    return " ".join(str(error).split()) or type(error).__name__


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
        usage = io.StringIO()
        error.show(usage)
        for line in usage.getvalue().rstrip("\n").split("\n"):
            click.echo(_readable_line(line), err=True)
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(EXIT_INTERRUPTED)

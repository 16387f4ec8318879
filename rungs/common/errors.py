"""Errors that commands report in one line instead of a traceback, and their exit codes."""

import io
import sys

import click

EXIT_BAD_INPUT = 2
"""Exit code of every command for bad input: a config, an argument, a dataset, a checkpoint."""
EXIT_FAILED = 1
"""Exit code of a command that could not finish."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C when there was nothing to save."""
_MOST_LINES, _MOST_CHARACTERS = 100, 600


class UserError(ValueError):
    """User input is wrong. Each line of the message says what is wrong and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(_readable(message))


class RunFailure(RuntimeError):
    """A run cannot continue although its input is right: a full disk, weights that are not finite.
    Each line of the message says what happened and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(_readable(message))


def _readable(message: str) -> str:
    """Return a message as printable lines of limited length, whatever it quotes from files."""
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
    """Return a library's error message as one line."""
    return " ".join(str(error).split()) or type(error).__name__


def run_command(command: click.Command) -> None:
    """Run a command. Errors go to stderr in one line each; the exit code is 2 for a `UserError`, 1
    for a `RunFailure` and 130 for Ctrl-C."""
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

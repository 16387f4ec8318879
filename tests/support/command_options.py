"""The options of the commands, and which of them invocations give."""

import importlib
from collections.abc import Iterator, Sequence

import click

from rungs.cli import COMMANDS
from rungs.cli.download_dataset import Options, _check_options
from tests.support.committed_runs import ROOT

SCRIPTS = [
    *(f"{name}.py" for name in COMMANDS),
    *(
        path.relative_to(ROOT).as_posix()
        for path in sorted(ROOT.glob("smoke_tests/*.py"))
        if "\nimport click\n" in path.read_text()
    ),
]
Option = tuple[str, str]
"""A command, such as `mup.py check`, and the first name of its option."""


def command_of(script: str) -> click.Command:
    """Return the command of a script of the repository."""
    name = script.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name if "." in name else f"rungs.cli.{name}")
    command: click.Command = module.main
    return command


def all_options() -> set[Option]:
    """Return the options of all commands and of their subcommands."""
    return {found for script in SCRIPTS for found in _options(script, command_of(script))}


def _options(name: str, command: click.Command) -> Iterator[Option]:
    if isinstance(command, click.Group):
        for inner, subcommand in command.commands.items():
            yield from _options(f"{name} {inner}", subcommand)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield name, parameter.opts[0]


def given_options(*line: str) -> set[Option]:
    """Return the options that the words of a command line give.

    Raises:
        click.UsageError: the command doesn't take them.
    """
    name, *words = line
    command = command_of(name)
    while isinstance(command, click.Group):
        name, command = f"{name} {words[0]}", command.commands[words.pop(0)]
    context = command.make_context(name, words)
    return {
        (name, parameter.opts[0])
        for parameter in command.params
        if isinstance(parameter, click.Option)
        and parameter.name
        and context.get_parameter_source(parameter.name) == click.core.ParameterSource.COMMANDLINE
    }


def check_arguments(script: str, words: Sequence[str]) -> None:
    """Check that a command takes these words.

    Raises:
        click.UsageError: it doesn't.
    """
    command, arguments = command_of(script), list(words)
    while isinstance(command, click.Group):
        command = command.commands[arguments.pop(0)]
    options = command.make_context(script, arguments).params
    if script == "download_dataset.py":
        of_kind = {name: options[name] for name in Options._fields}
        _check_options(options["what"], Options(**of_kind))

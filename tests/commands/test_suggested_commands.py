"""Every command and option that a message suggests is one that exists."""

import ast
import itertools
import re
import shlex
from collections.abc import Iterable, Iterator

import click

from tests.support.command_options import SCRIPTS, check_arguments, command_of
from tests.support.committed_runs import ROOT

SOURCES = [
    *SCRIPTS,
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("rungs/**/*.py")),
]
FILLED_IN = "1"
"""Stands for the values that a message fills in."""

_SCRIPT = "|".join(map(re.escape, SCRIPTS))
_END = r"[,;)](?:\s|$)|[`\n]|$"
SUGGESTED = re.compile(
    rf"uv run (?:--(?:extra|with) \S+ )*(?P<script>{_SCRIPT})(?P<arguments>.*?)(?={_END})"
)
"""A command ends with its line, at a backtick, or before a comma, a semicolon or a bracket."""
PLAIN = {
    "uv run train.py 1 --replay UNQUOTED",
    "uv run download_dataset.py UNQUOTED/UNQUOTED --tokenizer TOKENIZER",
    "uv run pretrained.py import UNQUOTED runs/UNQUOTED",
}
"""Commands with a step's name, or with one that a hub allows."""
INSTALLING = re.compile(r"uv sync --extra \S+|uv pip install --torch-backend cpu")
NAMED = re.compile(rf"(?<![\w/.])({_SCRIPT})\b")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*(?![\w-])")


def messages(source: str, unquoted: str = FILLED_IN) -> Iterator[str]:
    """Yield the strings of a file that are not docstrings; what they fill in without `quoted` is
    `unquoted`."""
    nodes: list[ast.AST] = [ast.parse((ROOT / source).read_text())]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else _filled_in(part, unquoted)
                for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value.replace("%s", FILLED_IN)
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            nodes += ast.iter_child_nodes(node)


def _filled_in(part: ast.expr, unquoted: str) -> str:
    assert isinstance(part, ast.FormattedValue)
    is_quoted = ast.unparse(part.value).startswith(("quoted(", "shown_text.quoted(", "place"))
    return FILLED_IN if is_quoted else unquoted


def options_of(command: click.Command) -> set[str]:
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    own = {option for parameter in command.params for option in parameter.opts}
    return own.union({"--help"}, *map(options_of, inner))


def parse(found: re.Match[str]) -> None:
    """Raise click.UsageError if the command does not take these arguments."""
    words = shlex.split(found["arguments"].removesuffix("&"), comments=True)
    check_arguments(found["script"], [FILLED_IN if word == "N" else word for word in words])


def suggestions(texts: Iterable[str]) -> list[re.Match[str]]:
    return [found for text in texts for found in SUGGESTED.finditer(text)]


def test_suggested_commands_take_their_arguments() -> None:
    found = {name: suggestions(messages(name)) for name in SOURCES}
    assert all(found[name] for name in ("rungs/cli/pretrained.py", "rungs/data/catalog.py"))
    for command in itertools.chain(*found.values()):
        assert "…" not in command["arguments"], f"{command[0]}: incomplete"
        parse(command)


def test_paths_in_suggested_commands_are_quoted() -> None:
    """So that a command for a run folder with spaces in its name can be copied."""
    for source in SOURCES:
        for command in suggestions(messages(source, unquoted="UNQUOTED")):
            assert "UNQUOTED" not in command["arguments"] or command[0] in PLAIN, command[0]


def test_messages_name_commands_in_full() -> None:
    for text in itertools.chain(*map(messages, SOURCES)):
        if " " in text:
            assert len(NAMED.findall(text)) == len(suggestions([text])), text


def test_options_in_messages_exist() -> None:
    """A command names its own options, and the packages those of any command."""
    every = set[str]().union(*(options_of(command_of(script)) for script in SCRIPTS))
    for source in SOURCES:
        script = source.removeprefix("rungs/cli/")
        known = options_of(command_of(script)) if script in SCRIPTS else every
        for text in messages(source):
            ours = INSTALLING.sub("", SUGGESTED.sub("", text))
            assert set(OPTION.findall(ours)) <= known, text

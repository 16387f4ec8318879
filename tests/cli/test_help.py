"""`--help` of every command loads Click and no other library, so that it is shown at once."""

import json
import subprocess
import sys

from rungs.cli import COMMANDS
from tests.support.committed_runs import ROOT

COMMAND_LINES = [
    *([name] for name in (*COMMANDS, "config")),
    ["mup", "check"],
    *(["pretrained", name] for name in ("import", "export", "upload")),
]
SHOW_HELP = """
import contextlib, importlib, io, json, sys
import click
before, loaded = {*sys.modules}, {}
for line in json.loads(sys.argv[1]):
    name, *words = line
    place = name if name == "config" else f"rungs.cli.{name}"
    with contextlib.redirect_stdout(io.StringIO()):
        importlib.import_module(place).main([*words, "--help"], standalone_mode=False)
    packages = {module.partition(".")[0] for module in {*sys.modules} - before}
    loaded[" ".join(line)] = [*packages - sys.stdlib_module_names - {"config", "click"}]
print(json.dumps(loaded))
"""
"""Prints which packages are loaded after the help of each command."""


def test_help_loads_only_click() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHOW_HELP, json.dumps(COMMAND_LINES)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {" ".join(line): ["rungs"] for line in COMMAND_LINES}


def test_rungs_lists_every_command() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "rungs", "--help"], capture_output=True, text=True, check=True
    )
    names = [line.split()[0] for line in shown.stdout.partition("Commands:\n")[2].splitlines()]
    assert names == [name.replace("_", "-") for name in COMMANDS]


def test_a_subcommand_of_rungs_is_the_command() -> None:
    line = [sys.executable, "-m", "rungs", "download-dataset", "../escape"]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")

"""`--help` of every command loads Click and no other library, so that it is shown at once."""

import json
import subprocess
import sys

from rungs.cli import COMMANDS
from tests.support.committed_runs import ROOT

COMMAND_LINES = [
    *([name.replace("-", "_")] for names in COMMANDS.values() for name in names),
    ["config"],
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


def test_rungs_groups_every_command_by_what_it_is_for() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "rungs", "--help"], capture_output=True, text=True, check=True
    )
    lines = shown.stdout.partition("Train:\n")[2].splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert names == [name for names in COMMANDS.values() for name in names]
    groups = [line.strip(":") for line in lines if line and not line.startswith("  ")]
    assert groups == [*COMMANDS][1:]
    files = {path.stem for path in (ROOT / "rungs" / "cli").glob("*.py")}
    others = {"__init__", "options", "start_command"}
    assert files - others == {name.replace("-", "_") for name in names}


def test_a_subcommand_of_rungs_is_the_command() -> None:
    line = [sys.executable, "-m", "rungs", "download-dataset", "../escape"]
    ended = subprocess.run(line, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ")


def test_a_supervised_command_of_python_m_is_started_in_the_same_way() -> None:
    """As a file, its folder would be where `import inspect` finds `rungs/inspect`."""
    line = [sys.executable, "-m", "rungs", "train", "no-such-run", "--supervise"]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: no-such-run: no such run folder")

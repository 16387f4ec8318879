"""`--help` of every command loads Click and no other library, so that it is shown at once."""

import subprocess
import sys

import pytest

from rungs.cli import COMMANDS
from tests.support.committed_runs import ROOT

SUBCOMMANDS = [
    *((f"{name}.py",) for name in (*COMMANDS, "config")),
    *(("mup.py", name) for name in ("check", "sweep")),
    *(("pretrained.py", name) for name in ("import", "export", "upload")),
]
RUN_AND_LIST_MODULES = """
import atexit, runpy, sys
del sys.argv[0]
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def libraries(*line: str) -> set[str]:
    """Return the packages outside the standard library that a program of Python loads, which prints
    its modules to stderr."""
    done = subprocess.run(
        [sys.executable, *line], cwd=ROOT, capture_output=True, text=True, check=True
    )
    packages = {name.partition(".")[0] for name in done.stderr.split()}
    return packages - sys.stdlib_module_names


@pytest.fixture(scope="module")
def of_click() -> set[str]:
    """What Click loads, and what every program of this environment does."""
    return libraries("-c", "import sys, click; print(*sys.modules, file=sys.stderr)")


@pytest.mark.parametrize("command", SUBCOMMANDS, ids=" ".join)
def test_help_loads_only_click(command: tuple[str, ...], of_click: set[str]) -> None:
    loaded = libraries("-c", RUN_AND_LIST_MODULES, *command, "--help")
    assert loaded - of_click == {"rungs"}


def test_rungs_lists_every_command_and_loads_only_click(of_click: set[str]) -> None:
    script = str(ROOT / "rungs" / "__main__.py")
    assert libraries("-c", RUN_AND_LIST_MODULES, script, "--help") - of_click == {"rungs"}
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

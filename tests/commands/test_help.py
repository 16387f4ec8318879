"""`--help` of every command loads Click and no other library, so that it is shown at once."""

import importlib
import subprocess
import sys

import click
import pytest

from tests.support.committed_runs import ROOT

RUN_AND_LIST_MODULES = """
import atexit, runpy, sys
del sys.argv[0]
atexit.register(lambda: print(*sys.modules, file=sys.stderr))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def commands() -> list[tuple[str, ...]]:
    """Each command at the root, and each of its subcommands."""
    found: list[tuple[str, ...]] = []
    for path in sorted({*ROOT.glob("*.py")} - {ROOT / "install_uv.py"}):
        main = importlib.import_module(path.stem).main
        inner = main.commands if isinstance(main, click.Group) else ()
        found += [(path.name,), *((path.name, name) for name in inner)]
    return found


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


@pytest.mark.parametrize("command", commands(), ids=" ".join)
def test_help_loads_only_click(command: tuple[str, ...], of_click: set[str]) -> None:
    loaded = libraries("-c", RUN_AND_LIST_MODULES, *command, "--help")
    assert loaded - of_click == {"rungs"}

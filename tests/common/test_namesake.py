"""The other project called `rungs`, installed into the same environment, before ours or after."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.installed import install

PROBLEM = "the package rungs 1.2.0 is here, too"
SCRIPT = "from rungs.__main__ import main\nmain()\n"
"""As installers write `rungs` and `rungs-lm`."""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = install(tmp_path)
    metadata = site / "rungs-1.2.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: rungs\nVersion: 1.2.0\n")
    return site


def run(site: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )


def write_script(site: Path, name: str) -> Path:
    script = site.parent / name
    script.write_text(SCRIPT)
    return script


def test_the_import_is_refused_if_ours_was_written_last(site: Path) -> None:
    ended = run(site, "-c", "import rungs")
    assert ended.returncode == 1
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert PROBLEM in last


@pytest.mark.parametrize("is_theirs", [False, True])
def test_the_command_says_it_in_one_line(is_theirs: bool, site: Path) -> None:
    """Only `rungs-lm` is left to us if theirs was written last."""
    if is_theirs:
        (site / "rungs" / "__init__.py").unlink()
        (site / "rungs" / "__init__.py").write_text('__version__ = "1.2.0"\n')
    ended = run(site, write_script(site, "rungs-lm" if is_theirs else "rungs"), "--help")
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    assert PROBLEM in line

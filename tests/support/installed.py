"""Rungs as the wheel installs it: a folder to import it from, which is no checkout."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.committed_runs import ROOT


def install(folder: Path) -> Path:
    """Make the folder `site` in `folder` and return it. Its files are links into the checkout."""
    package = folder / "site" / "rungs"
    (package / "shipped").mkdir(parents=True)
    for path in (ROOT / "rungs").iterdir():
        (package / path.name).symlink_to(path)
    for name in ("runs", "schemas"):
        (package / "shipped" / name).symlink_to(ROOT / name)
    return package.parent


def run_rungs(site: Path, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `rungs` with these arguments from there."""
    return subprocess.run(
        [sys.executable, "-m", "rungs", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=False,
    )

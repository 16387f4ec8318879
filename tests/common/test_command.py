"""Imports run without garbage collection, which is as it was before afterwards."""

from rungs.common.command import importing

import gc
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("was_enabled", [True, False])
def test_collection_pauses(was_enabled: bool) -> None:
    if not was_enabled:
        gc.disable()
    try:
        with importing():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
        gc.unfreeze()


def test_what_was_imported_is_not_searched_again() -> None:
    gc.unfreeze()
    try:
        with importing():
            kept: list[list[int]] = [[] for _ in range(1000)]
        assert gc.get_freeze_count() > len(kept)
    finally:
        gc.unfreeze()


def test_matplotlib_is_imported_whatever_backend_the_environment_names() -> None:
    code = "from rungs.common.command import begin_command; begin_command(); import matplotlib"
    environment = os.environ | {"MPLBACKEND": "nonsense"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def test_a_low_limit_of_open_files_is_raised_or_reported() -> None:
    def plan(limits: str) -> subprocess.CompletedProcess[str]:
        shell = f'{limits}; exec "{sys.executable}" plan.py runs/layers'
        return subprocess.run(["sh", "-c", shell], text=True, capture_output=True)

    refused = plan("ulimit -n 24")
    assert refused.returncode == 2
    assert refused.stderr == (
        "error: only 24 files may be open at once, which libraries fail with; allow more with"
        " ulimit -n 256\n"
    )
    assert plan("ulimit -S -n 24; ulimit -H -n 256").returncode == 0

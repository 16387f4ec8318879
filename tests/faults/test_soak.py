"""A short soak; `benchmarks/soak/soak.py --faults 200` is a longer one."""

import subprocess
import sys

import pytest

from tests.support.committed_runs import ROOT

FAULTS = 5


@pytest.mark.long
def test_a_short_soak_loses_nothing() -> None:
    script = [sys.executable, str(ROOT / "benchmarks/soak/soak.py"), "--faults", str(FAULTS)]
    ended = subprocess.run(script, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert f"{FAULTS} of {FAULTS} faults" in ended.stdout
    assert " 0 bytes of weights, optimizer state and metrics lost" in ended.stdout

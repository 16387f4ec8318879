"""A wish to stop: the first signal only notes it, a second one acts, one passed on is none."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
from rungs.common.signals import StopSignal
with StopSignal() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(float(sys.argv[1]))
    os.kill(os.getpid(), signal.SIGTERM)
print(stop.exit_code)
"""


@pytest.mark.parametrize(("seconds_between", "exit_code"), [(0.0, 0), (1.2, 143)])
def test_a_second_signal_acts_but_not_one_that_comes_with_the_first(
    seconds_between: float, exit_code: int
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(seconds_between)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == exit_code, ended.stderr
    assert "SIGTERM: saving after this step; send it again to stop at once" in ended.stderr
    assert ended.stdout == ("143\n" if exit_code == 0 else "")

"""Signals: the first asks to stop, a second one acts."""

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys
from rungs.common import signals
clock = iter([0.0, float(sys.argv[1])])
signals.time.monotonic = lambda: next(clock)
with signals.StopSignal() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
print(stop.exit_code)
"""


@pytest.mark.parametrize(("seconds_between", "exit_code"), [(0.9, 0), (1.1, 143)])
def test_a_second_signal_ends_the_process_unless_it_comes_with_the_first(
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


HANG_UP = """
import os, signal
from rungs.common.signals import StopSignal
with StopSignal() as stop:
    os.kill(os.getpid(), signal.SIGHUP)
print(stop.exit_code)
"""


@pytest.mark.parametrize(("launcher", "exit_code"), [((), 129), (("nohup",), 0)])
def test_a_hangup_asks_to_stop_unless_nohup_ignores_it(
    launcher: tuple[str, ...], exit_code: int
) -> None:
    ended = subprocess.run(
        [*launcher, sys.executable, "-c", HANG_UP], capture_output=True, text=True, check=False
    )
    assert ended.stdout == f"{exit_code}\n", ended.stderr
    assert ("SIGHUP: saving after this step" in ended.stderr) == (exit_code == 129)

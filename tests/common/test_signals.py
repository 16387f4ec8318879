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
    stop.begin()
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
    stop.begin()
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


DEADLOCK = """
import ctypes, os, signal, sys, threading, time
from rungs.common import signals
numbers = [signal.Signals[name] for name in sys.argv[1:]]

def send_all():
    for number in numbers:
        os.kill(os.getpid(), number)
        time.sleep(1.1)

signals.exit_on_signal()
with signals.StopSignal() as stop:
    if len(numbers) > 1:
        stop.begin()
    threading.Timer(0.1, send_all).start()
    lock = ctypes.create_string_buffer(256)
    while True:
        ctypes.CDLL(None).pthread_mutex_lock(lock)  # the second time it waits for ever
"""


@pytest.mark.parametrize("names", [("SIGINT",), ("SIGINT", "SIGINT")])
def test_signals_act_while_native_code_runs(names: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DEADLOCK, *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 130, ended.stderr
    noted, ended_at_once = "SIGINT: saving after this step; send it", "SIGINT: stopped;"
    said = [line for line in ended.stderr.splitlines() if line]
    expected = [noted, ended_at_once][-len(names) :]
    assert [line[: len(start)] for line, start in zip(said, expected, strict=True)] == expected

"""Signals: the first asks to stop, a second one acts."""

import signal
import subprocess
import sys

import pytest

from rungs.common import signals

STOP = """
import os, signal, sys
from rungs.common import signals
clock = iter(range(0, 1000, 2))
signals.time.monotonic = lambda: next(clock) * float(sys.argv[1]) / 2
signals.exit_on_signal()
with signals.StopSignal() as stop:
    stop.begin()
    for name in sys.argv[2:]:
        os.kill(os.getpid(), signal.Signals[name])
print(stop.exit_code)
"""
"""Sends itself signals, so many seconds apart."""


def stopped(
    *names: str, launcher: tuple[str, ...] = (), seconds: float = 0
) -> subprocess.CompletedProcess[str]:
    command = [*launcher, sys.executable, "-c", STOP, str(seconds), *names]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("seconds", "exit_code"), [(0.9, 0), (1.1, 143)])
def test_a_second_signal_ends_the_process_unless_it_comes_with_the_first(
    seconds: float, exit_code: int
) -> None:
    ended = stopped("SIGTERM", "SIGTERM", seconds=seconds)
    assert ended.returncode == exit_code, ended.stderr
    assert "SIGTERM: saving after this step; send it again to stop at once" in ended.stderr
    assert ended.stdout == ("143\n" if exit_code == 0 else "")


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("SIGHUP", ("nohup",)), ("SIGUSR1", ("sh", "-c", "trap '' USR1; exec \"$@\"", "sh"))],
)
def test_a_signal_asks_to_stop_unless_it_is_ignored_from_the_start(
    name: str, launcher: tuple[str, ...]
) -> None:
    ended = stopped(name)
    assert ended.stdout == f"{128 + signal.Signals[name]}\n"
    assert f"{name}: saving after this step" in ended.stderr
    ended = stopped(name, launcher=launcher)
    assert (ended.stdout, "saving" in ended.stderr) == ("0\n", False)


@pytest.mark.parametrize(
    ("names", "exit_code"),
    [
        (("SIGUSR2",), 140),
        (("SIGXCPU", "SIGXCPU", "SIGUSR1"), 152),  # the kernel repeats it every second
        (("SIGUSR1", "SIGTERM"), 143),  # first a warning, then the end
        (("SIGTERM", "SIGUSR1"), 143),
    ],
)
def test_a_warning_asks_to_stop_and_never_ends_the_process(
    names: tuple[str, ...], exit_code: int
) -> None:
    ended = stopped(*names)
    assert ended.stdout == f"{exit_code}\n"
    assert ended.stderr.count("saving after this step") == len(set(names) & {"SIGTERM"}) + (
        names[0] != "SIGTERM"
    )


WAIT = """
import ctypes
from rungs.common import signals
signals.exit_on_signal()
print(flush=True)
ctypes.CDLL(None).pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_before_the_first_step_a_signal_ends_native_code(number: signal.Signals) -> None:
    with subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        process.send_signal(number)
        assert process.wait(60) == -number


def test_a_signal_without_a_name_has_its_number() -> None:
    assert (signals.name_of(signal.SIGKILL), signals.name_of(40)) == ("SIGKILL", "signal 40")

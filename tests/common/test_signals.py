"""Signals: the first asks to stop, a second one acts."""

import signal
import subprocess
import sys

import pytest

from rungs.common import signals

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


INHERITED = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGUSR1])
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1]])
"""
RESTORED = """
import os, signal, subprocess
from rungs.common import command, signals
command.begin_command()
print(subprocess.run(["false"]).returncode, flush=True)
with signals.StopSignal() as stop:
    stop.begin()
    os.kill(os.getpid(), signal.SIGTERM)
print(stop.exit_code)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal masks")
def test_what_a_launcher_ignores_or_blocks_is_noticed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INHERITED, RESTORED], capture_output=True, text=True, check=False
    )
    assert ended.stdout == "1\n143\n", ended.stderr


STOP = """
import os, signal, sys
from rungs.common.signals import StopSignal, exit_on_signal
exit_on_signal()
with StopSignal() as stop:
    stop.begin()
    for name in sys.argv[1:]:
        os.kill(os.getpid(), signal.Signals[name])
print(stop.exit_code)
"""


def stopped(*names: str, launcher: tuple[str, ...] = ()) -> tuple[str, str]:
    """Return what a process prints that sends itself these signals."""
    ended = subprocess.run(
        [*launcher, sys.executable, "-c", STOP, *names], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, ended.stderr


@pytest.mark.parametrize(
    ("name", "launcher"),
    [("SIGHUP", ("nohup",)), ("SIGUSR1", ("sh", "-c", "trap '' USR1; exec \"$@\"", "sh"))],
)
def test_a_signal_asks_to_stop_unless_it_is_ignored_from_the_start(
    name: str, launcher: tuple[str, ...]
) -> None:
    printed, errors = stopped(name)
    assert printed == f"{128 + signal.Signals[name]}\n"
    assert f"{name}: saving after this step" in errors
    printed, errors = stopped(name, launcher=launcher)
    assert (printed, "saving" in errors) == ("0\n", False)


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
    printed, errors = stopped(*names)
    assert printed == f"{exit_code}\n"
    assert errors.count("saving after this step") == len(set(names) & {"SIGTERM"}) + (
        names[0] != "SIGTERM"
    )


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


@pytest.mark.parametrize("names", [("SIGINT",), ("SIGINT", "SIGINT"), ("SIGUSR1",)])
def test_signals_act_while_native_code_runs(names: tuple[str, ...]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DEADLOCK, *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ended.returncode == 128 + signal.Signals[names[0]], ended.stderr
    noted, ended_at_once = "SIGINT: saving after this step; send it", f"{names[0]}: stopped;"
    said = [line for line in ended.stderr.splitlines() if line]
    expected = [noted, ended_at_once][-len(names) :]
    assert [line[: len(start)] for line, start in zip(said, expected, strict=True)] == expected


def test_a_signal_without_a_name_has_its_number() -> None:
    assert (signals.name_of(signal.SIGKILL), signals.name_of(40)) == ("SIGKILL", "signal 40")

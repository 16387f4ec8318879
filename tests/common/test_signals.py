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

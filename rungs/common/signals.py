"""Signals that stop a run: they end a process that is starting, and ask a training process to stop
after its step. A signal that is inherited as ignored, as under `nohup`, stays ignored."""

from __future__ import annotations  # an older Python must reach the message of `command.py`

import contextlib
import os
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import Self

_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, `kill`, a closed terminal or a dropped SSH connection."""
_WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)
"""Signals that Slurm, Grid Engine, LSF and CPU-time limits send some time before they end a job.
They never count as the second signal, as the kernel repeats SIGXCPU every second."""
_SECONDS_OF_ONE_REQUEST = 1.0


def exit_on_signal() -> None:
    """Let Ctrl-C end this process at once from now on, as the system does for other signals. Before
    the first step there is nothing to save, and Python would wait until XLA has compiled."""
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Interrupted(Exception):
    """Raised when a signal arrives during a step, a validation or a scoring."""


class StopSignal:
    """Between `begin` and the end of the `with` block, the first signal only sets `number`; a
    second SIGINT, SIGTERM or SIGHUP ends the process. Within a second of the first it is ignored,
    as a launcher such as `uv run` may forward a signal that the process group has already
    received."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._requested_at: float | None = None
        self._former: dict[signal.Signals, Any] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, such as 130 after SIGINT (Ctrl-C); 0 without one."""
        return 128 + self.number if self.number else 0

    def begin(self) -> None:
        """Note signals from now on, as soon as Python runs: a step that XLA computes ends first."""
        if not self._former:
            self._former = {each: signal.signal(each, self._note) for each in stopping_signals()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: object) -> None:
        name, now = name_of(number), time.monotonic()
        if number in _WARNINGS:
            if self.number is None:
                self.number = number
                _print(f"{name}: saving after this step")
        elif self._requested_at is None:
            self.number, self._requested_at = number, now
            _print(f"{name}: saving after this step; send it again to stop at once")
        elif now - self._requested_at >= _SECONDS_OF_ONE_REQUEST:
            _print(f"{name}: stopped; to resume, run the same command without --fresh and --from")
            os._exit(128 + number)


def stopping_signals() -> list[signal.Signals]:
    """Return the signals that stop a run, except ignored ones."""
    return [each for each in _REQUESTS + _WARNINGS if signal.getsignal(each) != signal.SIG_IGN]


def name_of(number: int) -> str:
    """Return the name of a signal, such as SIGTERM; of one without a name `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal must not prevent the save
        os.write(2, f"\n{line}\n".encode())

"""Signals that stop a run: they end a process that is starting, and ask a training one to stop
after the current step. One that the process inherits as ignored, as under `nohup`, stays ignored.
"""

from __future__ import annotations  # an older Python must get as far as `command.py`

import contextlib
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rungs.common import standard_streams

if TYPE_CHECKING:
    from typing import Self

_REQUESTS = ("SIGINT", "SIGTERM", "SIGHUP")
"""Ctrl-C, `kill`, and a terminal that was closed or an SSH connection that dropped."""
_WARNINGS = ("SIGUSR1", "SIGUSR2", "SIGXCPU")
"""What Slurm, Grid Engine, LSF and limits on processor time send some time before they end a job.
The kernel repeats SIGXCPU every second, so only a request counts as the second signal."""
_SECONDS_OF_ONE_REQUEST = 1.0

Action = Callable[[int], None]
"""What a signal does, called with its number."""


def exit_on_signal() -> None:
    """From now on the signals that stop a run end this process at once, with exit code 128 + the
    signal's number: before the first step there is nothing to save, and some code that imports or
    compiles would swallow an exception."""
    standard_streams.open_missing()  # before the listener's socket takes the number of one
    _Listener(_end).begin()


def _end(number: int) -> None:
    name = signal.Signals(number).name
    _print(f"{name}: stopped; to resume, run the same command without --fresh and --from")
    os._exit(128 + number)


class Interrupted(Exception):
    """Raised when a signal arrives before a step, a validation or a scoring is done."""


class StopSignal:
    """After `begin`, and until the end of the `with` block, the first signal only sets `number`; a
    second SIGINT, SIGTERM or SIGHUP ends the process. A second one within a second of the first is
    ignored: a launcher such as `uv run` may forward a signal that the process has already received
    with its process group."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._requested_at: float | None = None
        self._listener: _Listener | None = None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, such as 130 after SIGINT (Ctrl-C); 0 without one."""
        return 128 + self.number if self.number else 0

    def begin(self) -> None:
        """Note signals from now on: there is something to save."""
        if self._listener is None:
            self._listener = _Listener(self._note)
            self._listener.begin()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()

    def _note(self, number: int) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if name in _WARNINGS:
            if self.number is None:
                self.number = number
                _print(f"{name}: saving after this step")
            return
        if self._requested_at is not None:
            if now - self._requested_at < _SECONDS_OF_ONE_REQUEST:
                return
            _end(number)
        self.number, self._requested_at = number, now
        _print(f"{name}: saving after this step; send it again to stop at once")


class _Listener:
    """Acts on each signal once and at once, from `begin` to `close`. Python calls a handler only in
    the main thread and between two instructions, so not while XLA compiles or a step runs: a thread
    of its own acts then. Both learn of a signal from the byte that the system writes to a socket,
    see `signal.set_wakeup_fd`."""

    def __init__(self, action: Action) -> None:
        self._action, self._numbers, self._acting = action, stopping_signals(), threading.RLock()
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def begin(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        self._former_fd = signal.set_wakeup_fd(self._sender.fileno())
        self._former = {number: signal.signal(number, self._act) for number in self._numbers}

    def close(self) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._sender.close()  # ends the thread

    def _listen(self) -> None:
        with self._receiver:
            while select.select([self._receiver], [], []) and self._act():
                pass

    def _act(self, *_: object) -> bool:
        """Act on the signals received so far; return whether more may come."""
        with self._acting:
            try:
                received = self._receiver.recv(64)
            except BlockingIOError:  # the other thread was faster
                return True
            for number in received:
                if number in self._numbers:
                    self._action(number)
            return bool(received)


def stopping_signals() -> list[signal.Signals]:
    """Return the signals that stop a run, without those that this process ignores and those that
    its system doesn't have."""
    there = [number for number in signal.Signals if number.name in _REQUESTS + _WARNINGS]
    return [number for number in there if signal.getsignal(number) != signal.SIG_IGN]


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal must not prevent the save
        os.write(2, f"\n{line}\n".encode())

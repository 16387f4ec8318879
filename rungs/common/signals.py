"""Signals that stop a run: they end a process that is starting, and ask a training process to stop
after its step. A signal that is inherited as ignored, as under `nohup`, stays ignored."""

from __future__ import annotations  # an older Python must reach the message of `command.py`

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from rungs.common import shown_text

if TYPE_CHECKING:
    from typing import Self

_REQUESTS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")
"""Ctrl-C, `kill`, a closed terminal or a dropped SSH connection; on Windows Ctrl-Break."""
_WARNINGS = ("SIGUSR1", "SIGUSR2", "SIGXCPU")
"""Signals that Slurm, Grid Engine, LSF and CPU-time limits send some time before they end a job.
They never count as the second signal, as the kernel repeats SIGXCPU every second."""
_SECONDS_OF_ONE_REQUEST = 1.0

Action = Callable[[int], None]
"""Handler of a signal, called with its number."""


def exit_on_signal() -> None:
    """From now on, signals that stop a run end this process at once with exit code 128 + the
    signal's number. Before the first step there is nothing to save, and code that imports or
    compiles may swallow an exception."""
    shown_text.prepare_streams()  # else the listener's socket may take a stream's number
    _Listener(_end).begin()


def _end(number: int) -> None:
    name = signal.Signals(number).name
    _print(f"{name}: stopped; to resume, run the same command without --fresh and --from")
    os._exit(128 + number)


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
        self._listener: _Listener | None = None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, such as 130 after SIGINT (Ctrl-C); 0 without one."""
        return 128 + self.number if self.number else 0

    def begin(self) -> None:
        """Start recording signals, as there is something to save now."""
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
    """Acts on each signal exactly once and immediately, from `begin` to `close`. Python runs
    handlers only in the main thread between two instructions, so not while XLA compiles or a step
    runs: then a thread acts. Both read the byte that the system writes to a socket; see
    `signal.set_wakeup_fd`."""

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


def restore_inherited() -> None:
    """Undo what some launchers leave to their children: SIGCHLD ignored, which hides how a child
    ended, and stopping signals blocked, which would never arrive."""
    if sys.platform != "win32":
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, stopping_signals())


def stopping_signals() -> list[signal.Signals]:
    """Return the signals that stop a run and that this system has, except ignored ones."""
    there = [number for number in signal.Signals if number.name in _REQUESTS + _WARNINGS]
    return [number for number in there if signal.getsignal(number) != signal.SIG_IGN]


def number_of(name: str) -> int:
    """Return the number of a signal, 0 if this system doesn't have it."""
    return getattr(signal, name, 0)


def name_of(number: int) -> str:
    """Return the name of a signal, such as SIGTERM; of one without a name `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal must not prevent the save
        os.write(2, f"\n{line}\n".encode())

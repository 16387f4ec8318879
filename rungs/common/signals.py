"""SIGINT, SIGTERM and SIGHUP: they end a process that is starting, and ask a training one to stop
after the current step."""

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Self

_SECONDS_OF_ONE_REQUEST = 1.0


def exit_on_signal() -> None:
    """From now on SIGINT, SIGTERM and SIGHUP end this process at once, with exit code 128 + the
    signal's number. Before the first step there is nothing to save. An exception would pass through
    whatever is being imported or compiled, and some of that code swallows exceptions."""
    for number in _stopping():
        signal.signal(number, _end)


def _stopping() -> list[signal.Signals]:
    """Return the signals that stop a run: SIGINT (Ctrl-C), SIGTERM, and SIGHUP (the terminal was
    closed, or an SSH connection dropped) unless `nohup` had it ignored. Windows has no SIGHUP."""
    numbers = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


def _end(number: int, _frame: FrameType | None = None) -> None:
    _print(f"{signal.Signals(number).name}: stopped; run the same command to resume")
    os._exit(128 + number)


class StopSignal:
    """While entered, the first SIGINT, SIGTERM or SIGHUP only sets `number`; a second one ends the
    process. A second signal within a second of the first is ignored: a launcher such as `uv run`
    may forward a signal that the process has already received with its process group.

    Attributes:
        number: the signal received, or None.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._noted_at = 0.0
        self._former: dict[int, signal._HANDLER] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 130 after SIGINT (Ctrl-C), 143 after SIGTERM, 129 after
        SIGHUP; 0 without."""
        return 128 + self.number if self.number else 0

    def __enter__(self) -> Self:
        for number in _stopping():
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            if time.monotonic() - self._noted_at < _SECONDS_OF_ONE_REQUEST:
                return
            _end(number)
        self.number, self._noted_at = number, time.monotonic()
        name = signal.Signals(number).name
        _print(f"{name}: saving after this step; send it again to stop at once")


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # a closed terminal must not prevent the save
        os.write(2, f"\n{line}\n".encode())

"""SIGINT and SIGTERM: the end of a start, and then a wish to stop at the next step boundary."""

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Self

_STOPPING = (signal.SIGINT, signal.SIGTERM)
_SECONDS_OF_ONE_WISH = 1.0


def exit_on_signal() -> None:
    """From now on SIGINT or SIGTERM ends this process with the exit code of one that it stopped:
    until the first step there is nothing to save, and a kill harms nothing. An exception would pass
    through whatever is being imported or built, some of which keeps such to itself."""
    for number in _STOPPING:
        signal.signal(number, _end)


def _end(number: int, _frame: FrameType | None = None) -> None:
    _say(f"{signal.Signals(number).name}: stopped; the same command goes on")
    os._exit(128 + number)


class StopSignal:
    """While entered, the first SIGINT or SIGTERM only sets `number`; a second one ends the process,
    but not one that comes with the first: a launcher may pass on what the process has had already,
    as `uv run` does where a whole group of processes is told to stop.

    Attributes:
        number: the signal received, or None.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._noted_at = 0.0
        self._former: dict[int, signal._HANDLER] = {}

    @property
    def exit_code(self) -> int:
        """128 + the signal's number: 130 after SIGINT (Ctrl-C), 143 after SIGTERM; 0 without."""
        return 128 + self.number if self.number else 0

    def __enter__(self) -> Self:
        for number in _STOPPING:
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            if time.monotonic() - self._noted_at < _SECONDS_OF_ONE_WISH:
                return
            _end(number)
        self.number, self._noted_at = number, time.monotonic()
        name = signal.Signals(number).name
        _say(f"{name}: saving after this step; once more to stop at once")


def _say(line: str) -> None:
    with contextlib.suppress(OSError):  # a terminal that is gone must not cost the save
        os.write(2, f"\n{line}\n".encode())

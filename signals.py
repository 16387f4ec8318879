"""SIGINT and SIGTERM as a wish to stop at the next step boundary."""

import contextlib
import os
import signal
import time
from types import FrameType
from typing import Self

_SECONDS_OF_ONE_WISH = 1.0


class StopSignal:
    """While entered, the first SIGINT or SIGTERM only sets `number`; a second one acts at once, but
    not one that comes with the first: a launcher may pass on what the process has had already, as
    `uv run` does where a whole group of processes is told to stop.

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
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.number is not None:
            if time.monotonic() - self._noted_at < _SECONDS_OF_ONE_WISH:
                return
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.number, self._noted_at = number, time.monotonic()
        name = signal.Signals(number).name
        with contextlib.suppress(OSError):  # a terminal that is gone must not cost the save
            os.write(2, f"\n{name}: saving after this step; once more to stop at once\n".encode())

"""Tells when a run has stalled: no step for far longer than any step took."""

import threading
import time
from collections.abc import Callable

SECONDS = 600.0
"""A run has not stalled before this."""
FACTOR = 10.0
"""Nor before so many times the longest step so far, with its validation and compilation."""
_SECONDS_BETWEEN = 5.0


class Watchdog:
    """Calls back once for each stall.

    Args:
        stalled: called with the seconds since the last step.
        seconds: the shortest stall.
    """

    def __init__(self, stalled: Callable[[float], None], seconds: float = SECONDS) -> None:
        self._stalled, self._seconds = stalled, seconds
        self._last, self._longest = time.monotonic(), 0.0
        self._is_told = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._last = time.monotonic()
        self._thread.start()

    def step_taken(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last, self._is_told = now, False

    def finish(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(min(_SECONDS_BETWEEN, self._seconds / 4)):
            waited = time.monotonic() - self._last
            if not self._is_told and waited > max(self._seconds, FACTOR * self._longest):
                self._is_told = True
                self._stalled(waited)

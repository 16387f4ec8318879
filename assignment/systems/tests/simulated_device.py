"""A device whose clock is moved by what is done, not by time: measurements are exact and the same
everywhere."""

from collections.abc import Callable
from typing import Any

DISPATCH, COMPILE = 0.25, 16.0
"""Seconds for which a call keeps Python busy; and the first one of a function."""


class Result:
    """An array that is ready at some time."""

    def __init__(self, device: "Device", ready: float) -> None:
        self._device, self._ready = device, ready

    def block_until_ready(self) -> "Result":
        self._device.now = max(self._device.now, self._ready)
        return self


class Device:
    def __init__(self) -> None:
        self.now = 0.0
        self._free = 0.0

    def clock(self) -> float:
        return self.now

    def function(self, seconds: Callable[[int], float]) -> Callable[..., Any]:
        """Return a function whose call number i, counted from 0, takes `seconds(i)` on the device,
        after what was handed over before. Its result is a tree of arrays."""
        calls = 0

        def call(*arguments: Any) -> dict[str, tuple[Result, ...]]:
            del arguments
            nonlocal calls
            self.now += DISPATCH if calls else COMPILE
            duration = seconds(calls)
            self._free = max(self._free, self.now) + duration
            calls += 1
            first, last = Result(self, self._free - duration / 2), Result(self, self._free)
            return {"results": (first, last)}

        return call

"""When an upload last moved on, as fsspec reports it."""

import time

import fsspec


class Progress(fsspec.Callback):
    """Notes when an upload moved on.

    Attributes:
        moved_at: when, on the monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moved_at = time.monotonic()

    def call(self, *_: object, **__: object) -> None:
        self.moved_at = time.monotonic()

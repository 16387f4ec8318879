"""Imports of large libraries, in less time."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Import without garbage collection: what a module creates stays, and searching it for garbage,
    over and over while more is created, takes a fifth of the time until a first step. Nor is it
    searched later; see `gc.freeze`."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()

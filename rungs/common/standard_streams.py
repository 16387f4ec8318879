"""stdin, stdout and stderr of a command: always open, and safe for a terminal."""

import io
import os
import re
import sys
from pathlib import Path

from rungs.common.shown_text import visible

_OF_A_BAR = re.compile(r"(\r|\x1b\[A)")
"""Control sequences with which tqdm moves the cursor."""


class Closed(io.TextIOWrapper):
    """The null device in place of a stdout that was closed at startup."""


def open_missing() -> None:
    """Open the null device for each stream that was closed at startup. Otherwise the next opened
    file would get its number, and everything that native code prints."""
    for name, mode in (("stdin", "rb"), ("stdout", "wb"), ("stderr", "wb")):
        if getattr(sys, name) is None:
            null = Path(os.devnull).open(mode)  # noqa: SIM115
            os.set_inheritable(null.fileno(), True)
            kind = Closed if name == "stdout" else io.TextIOWrapper
            setattr(sys, name, kind(null, encoding="utf-8"))


def protect_terminal() -> None:
    """Escape control characters from now on where stdout and stderr are a terminal. Generated text,
    and names in other people's files, could otherwise control it."""
    for name, kind in (("stdout", _Visible), ("stderr", _VisibleWithBars)):
        stream = getattr(sys, name)
        if isinstance(stream, io.TextIOWrapper) and stream.isatty():
            protected = kind(stream.buffer, stream.encoding, stream.errors, line_buffering=True)
            setattr(sys, name, protected)


class _Visible(io.TextIOWrapper):
    """A terminal."""

    def write(self, text: str) -> int:
        super().write(visible(text))
        return len(text)


class _VisibleWithBars(io.TextIOWrapper):
    """A terminal with progress bars."""

    def write(self, text: str) -> int:
        parts = _OF_A_BAR.split(text)
        super().write("".join(p if n % 2 else visible(p) for n, p in enumerate(parts)))
        return len(text)

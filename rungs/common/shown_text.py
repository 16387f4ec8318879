"""Text as users see it: without secrets and control characters; tables, durations, commands."""

from __future__ import annotations  # an older Python must reach the message of `command.py`

import os
import re
import shlex
from collections.abc import Sequence

_URL_USER = re.compile(r"(?<=://)[^/\s\"'<>]+@")


def without_secrets(text: str) -> str:
    """Return a text with `***` for HF_TOKEN and for users and passwords in URLs."""
    if token := os.environ.get("HF_TOKEN"):
        text = text.replace(token, "***")
    return _URL_USER.sub("***@", text)


def shown(text: str) -> str:
    """Return a text without secrets, and with unprintable characters other than newlines and tabs
    escaped, as in `\\x1b`: a terminal acts on some, and lone surrogates can't be encoded."""
    return "".join(
        each if each.isprintable() or each in "\n\t" else each.encode("unicode_escape").decode()
        for each in without_secrets(text)
    )


def quoted(value: object) -> str:
    """Return a path or name quoted for a shell, for commands that messages suggest."""
    return shlex.quote(str(value))


def command_line(name: str) -> str:
    """Return how to call a command: `uv run train.py` in a checkout, else `rungs train`."""
    return f"uv run {name}.py" if _in_checkout() else f"rungs {name.replace('_', '-')}"


def install_line(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"uv sync --extra {extra}" if _in_checkout() else f"uv pip install 'rungs-lm[{extra}]'"


def _in_checkout() -> bool:
    from rungs.common.paths import checkout  # which imports this module

    return checkout() is not None


def align_columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows as lines with aligned columns, the first `left` flush left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = ["<" if column < left else ">" for column in range(len(widths))]
    form = "  ".join(f"{{:{align}{width}}}" for align, width in zip(aligns, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in rows)


def format_bytes(size: float) -> str:
    """Return bytes in MB or GB."""
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def counted(count: int, thing: str) -> str:
    """Return a count of things, such as `1 step` or `2,000 batches`. `thing` is a singular noun
    with a plural in -s, or -es after -ch and -s."""
    ending = "es" if thing.endswith(("ch", "s")) else "s"
    return f"{count:,} {thing}{ending * (count != 1)}"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02} min" if hours < 48 else f"{hours // 24} d {hours % 24:02} h"

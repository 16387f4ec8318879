"""Text as users see it: without secrets and control characters; columns, counts and durations;
stdin, stdout and stderr of a command, always open and safe for a terminal."""

from __future__ import annotations  # an older Python must reach the message of `command.py`

import io
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path, PurePath

_HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"SECRET|PASSWO?R?D"
    r"|(TOKEN|KEY|PASS|PWD|CREDENTIAL|AUTH|COOKIE|DSN|WEBHOOK|WEBHOOK_URL|CONNECTION_STRING)S?$",
    re.IGNORECASE,
)
"""Names of environment variables that hold secrets: HF_TOKEN, but not TOKENIZERS_PARALLELISM."""
_LEAST_CHARACTERS = 6
"""Shorter values are ordinary words, such as "true", that messages need."""
_URL = re.compile(r"""([A-Za-z][\w+.-]{0,20}://)([^?#\s"'<>]*@)?([^?#\s"'<>]*)([?#][^\s"'<>]*)?""")
_QUERY_VALUE = re.compile(r"=([^&;#]+)")
_CREDENTIAL = re.compile(
    r"""((?:authorization|cookie|password|passwd|secret|api[-_]?key|access[-_]?key|auth[-_]?token)"""
    r"""["']?\s*[:=]\s*["']?(?:(?:bearer|basic|token)\s+)?|\bbearer\s+)[^\s"',;}]+|\bhf_\w{16,}""",
    re.IGNORECASE,
)
"""Headers and settings with a secret, and access tokens of the hub."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters of terminals, bidirectional overrides, which reorder a line, and lone
surrogates, which can't be encoded."""

_noted: set[str] = set()
_OF_A_BAR = re.compile(r"(\r|\x1b\[A)")
"""Control sequences with which tqdm moves the cursor."""


def hide(secret: str) -> None:
    """Remove this text from everything shown from now on."""
    _noted.add(secret)


def shown(text: str) -> str:
    """Return a text without secrets, and with control characters other than newlines and tabs
    escaped, as in `\\x1b`."""
    return visible(without_secrets(text))


def quoted(value: object) -> str:
    """Return a path or name quoted for a shell, for commands that messages suggest."""
    return shlex.quote(str(value))


def visible(text: str) -> str:
    """Return a text with control characters other than newlines and tabs escaped."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def is_secret_name(name: str) -> bool:
    """Return whether a variable or key of this name probably holds a secret: HF_TOKEN, api_key."""
    return bool(_SECRET_NAME.search(name))


def without_secrets(text: str) -> str:
    """Return a text with `***` for secrets: user and query of URLs, header values, values of
    environment variables with secret names, and texts passed to `hide`."""
    for secret in sorted(_known(), key=len, reverse=True):
        text = text.replace(secret, _HIDDEN)
    text = _URL.sub(_shown_url, text)
    return _CREDENTIAL.sub(_shown_credential, text)


def _shown_credential(found: re.Match[str]) -> str:
    """Return a header without its value. "PATH: what is wrong with it" is none, if PATH is on the
    command line."""
    begin = found.string.rfind("\n", 0, found.start()) + 1
    subject = found.string[begin:].partition(": ")[0]
    given = {PurePath(text.rpartition("=")[2]).name for text in sys.argv}
    if found.start() < begin + len(subject) < found.end() and PurePath(subject).name in given:
        return found[0]
    return f"{found[1] or ''}{_HIDDEN}"


def _shown_url(url: re.Match[str]) -> str:
    scheme, user, place, query = url.groups(default="")
    return scheme + f"{_HIDDEN}@" * bool(user) + place + query[:1] + _HIDDEN * bool(query)


def _in_quotes(secret: str) -> set[str]:
    shown = json.dumps(secret), json.dumps(secret, ensure_ascii=False), repr(secret)
    return {text[1:-1] for text in shown}


def _known() -> set[str]:
    """Return the secrets in the environment and the command line: as they are, URL-decoded, and as
    JSON and Python show them."""
    named = [value for name, value in os.environ.items() if is_secret_name(name)]
    found = {*_noted, *(value for value in named if not value.startswith("/"))}  # a file with it
    for text in (*os.environ.values(), *sys.argv):
        for _, user, _, query in _URL.findall(text):
            name, separator, password = user.rstrip("@").partition(":")
            found |= {password if separator else name, *_QUERY_VALUE.findall(query)}
            # libraries end a password at a slash, and report the part before it as the port
            found.add(password.partition("/")[0])
    found |= {_decoded(secret) for secret in found}
    found |= {form for secret in found for form in _in_quotes(secret)}
    return {secret for secret in found if len(secret) >= _LEAST_CHARACTERS}


def _decoded(secret: str) -> str:
    """Return a part of a URL without its percent signs, as libraries quote it."""
    return re.sub(r"%([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), secret)


def align_columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows as lines with aligned columns, the first `left` flush left, others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligns = ["<" if column < left else ">" for column in range(len(widths))]
    form = "  ".join(f"{{:{align}{width}}}" for align, width in zip(aligns, widths, strict=True))
    return "\n".join(form.format(*row).rstrip() for row in rows)


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


_ERRORS = {
    "stdin": "surrogateescape",
    "stdout": "backslashreplace",
    "stderr": "backslashreplace",
}
"""Standard streams, and how each handles what is not UTF-8."""


class ClosedStream(io.TextIOWrapper):
    """The null device in place of a stdout that was closed at startup."""


def prepare_streams() -> None:
    """Open the null device for each stream that was closed at startup. Otherwise the next opened
    file would get its number, and everything that native code prints. The others are in UTF-8,
    whatever the environment or Windows would choose; what isn't is read as lone surrogates, and
    written as escapes."""
    for name, errors in _ERRORS.items():
        stream = getattr(sys, name)
        if stream is None:
            null = Path(os.devnull).open("rb" if name == "stdin" else "wb")  # noqa: SIM115
            os.set_inheritable(null.fileno(), True)
            kind = ClosedStream if name == "stdout" else io.TextIOWrapper
            setattr(sys, name, kind(null, encoding="utf-8"))
        elif isinstance(stream, io.TextIOWrapper) and (
            (stream.encoding.lower(), stream.errors) != ("utf-8", errors)
        ):  # again, after reading, would raise
            stream.reconfigure(encoding="utf-8", errors=errors)


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

"""Text that is safe to show: without secrets and terminal control characters."""

from __future__ import annotations  # an older Python must reach the message of `command.py`

import os
import re
import shlex
import sys

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
    return _CREDENTIAL.sub(lambda found: f"{found[1] or ''}{_HIDDEN}", text)


def _shown_url(url: re.Match[str]) -> str:
    scheme, user, place, query = url.groups(default="")
    return scheme + f"{_HIDDEN}@" * bool(user) + place + query[:1] + _HIDDEN * bool(query)


def _known() -> set[str]:
    """Return the secrets in the environment and the command line, as is and URL-decoded."""
    named = [value for name, value in os.environ.items() if is_secret_name(name)]
    found = {*_noted, *(value for value in named if not value.startswith("/"))}  # a file with it
    for text in (*os.environ.values(), *sys.argv):
        for _, user, _, query in _URL.findall(text):
            name, separator, password = user.rstrip("@").partition(":")
            found |= {password if separator else name, *_QUERY_VALUE.findall(query)}
            # libraries end a password at a slash, and report the part before it as the port
            found.add(password.partition("/")[0])
    found |= {_decoded(secret) for secret in found}
    return {secret for secret in found if len(secret) >= _LEAST_CHARACTERS}


def _decoded(secret: str) -> str:
    """Return a part of a URL without its percent signs, as libraries quote it."""
    return re.sub(r"%([0-9A-Fa-f]{2})", lambda found: chr(int(found[1], 16)), secret)

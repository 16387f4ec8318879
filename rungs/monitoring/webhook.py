"""The program that tells a webhook of an event, in a process that is killed if the server takes too
long: a timeout of a socket begins again with each byte. It reads the URL and, on the next line, the
JSON to send: a command line would show a secret in the URL to all users of the machine."""

import base64
import contextlib
import signal
import sys
import urllib.parse
import urllib.request

_LONGEST_SECONDS = 60
"""After which the process ends itself, in case nobody is left to kill it."""


def main() -> None:
    """Send a POST request; end with an exit code of 1 and a line if that fails."""
    with contextlib.suppress(AttributeError):  # Windows has none
        signal.alarm(_LONGEST_SECONDS)
    url, text = sys.stdin.read().split("\n", 1)
    try:
        with urllib.request.urlopen(_request(url, text)):
            pass
    except Exception as error:  # of any server
        sys.exit(f"{type(error).__name__}: {error}")


def _request(url: str, text: str) -> urllib.request.Request:
    """Return the request; a user and a password in the URL become a header."""
    headers = {"Content-Type": "application/json"}
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    if user:
        token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
    return urllib.request.Request(parts._replace(netloc=host).geturl(), text.encode(), headers)


if __name__ == "__main__":
    main()

"""The program that sends an event to a webhook. It is a process because that can be killed if the
server is slow: a socket's timeout restarts with each byte. It reads the URL and the JSON, a line
each, from stdin: on a command line, all users would see a secret in the URL."""

import base64
import faulthandler
import sys
import urllib.parse
import urllib.request

_LONGEST_SECONDS = 60
"""The process ends itself after this time, in case its parent is gone."""


def main() -> None:
    """Send a POST request; on failure print a line and exit with code 1."""
    faulthandler.dump_traceback_later(_LONGEST_SECONDS, exit=True)
    url, text = sys.stdin.read().split("\n", 1)
    try:
        with urllib.request.urlopen(_request(url, text)):
            pass
    except Exception as error:  # of any server
        sys.exit(f"{type(error).__name__}: {error}")


def _request(url: str, text: str) -> urllib.request.Request:
    """Return the request, with a user and password in the URL moved to a header."""
    headers = {"Content-Type": "application/json"}
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    if user:
        token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
    return urllib.request.Request(parts._replace(netloc=host).geturl(), text.encode(), headers)


if __name__ == "__main__":
    main()

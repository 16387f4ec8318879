"""The page on 127.0.0.1, with new steps as runs train: `charts.py RUN… --watch`."""

import re
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import click

from rungs.common.errors import UserError, reason
from rungs.report.run_page import page, page_data
from rungs.report.shown_run import ShownRun

HOST = "127.0.0.1"
_SINCE = re.compile(r"since=([0-9]{1,15})")
_SECONDS_OF_SILENCE = 60.0
"""Idle time after which a connection is closed."""


class PageServer(ThreadingHTTPServer):
    """Serves the page of some runs to this machine only, at a port, or a free one if that is 0. A
    page that asks for changes gets runs with new steps. Raises UserError if the port is taken."""

    def __init__(self, runs: Sequence[ShownRun], port: int = 0) -> None:
        self._runs, self._lock = runs, threading.Lock()
        self._version = 0
        self._changed_at = dict.fromkeys((run.name for run in runs), 0)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}; choose another") from None

    @property
    def address(self) -> str:
        """URL to open in a browser."""
        return f"http://{HOST}:{self.server_port}/"

    @property
    def hosts(self) -> set[str]:
        """Accepted Host headers; other sites may point their own name at this machine."""
        return {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def handle_error(self, *_: object) -> None:
        """Print one line, or nothing if the browser has disconnected."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, ConnectionError | TimeoutError):
            click.echo(f"the page was not sent: {reason(error)}", err=True)

    def whole_page(self) -> str:
        """Return the page with the steps so far."""
        with self._lock:
            self._refresh()
            return page(self._runs, version=self._version)

    def changes(self, since: int) -> str:
        """Return the runs that have changed since a version, as JSON."""
        with self._lock:
            self._refresh()
            changed = [run for run in self._runs if self._changed_at[run.name] > since]
            return page_data(self._runs, changed, version=self._version)

    def _refresh(self) -> None:
        changed = [run for run in self._runs if run.refresh()]
        self._version += bool(changed)
        self._changed_at |= dict.fromkeys((run.name for run in changed), self._version)


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _SECONDS_OF_SILENCE

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        since = _SINCE.fullmatch(query)
        if self.headers.get("Host") not in self.server.hosts:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif path == "/":
            self._answer(self.server.whole_page(), "text/html")
        elif path == "/changes":
            changes = self.server.changes(int(since[1]) if since else 0)
            self._answer(changes, "application/json")
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, text: str, kind: str) -> None:
        content = text.encode(errors="replace")  # lone surrogates in file names
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log no requests."""

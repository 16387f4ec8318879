"""Commands and webhooks that are told the events of a run."""

import base64
import contextlib
import json
import shlex
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from rungs.common.errors import UserError
from rungs.integrations import hooks
from rungs.integrations.hooks import Hooks, check_hooks


@pytest.mark.parametrize(
    "hook",
    [
        "no-such-program-xyz",
        "'unclosed",
        " ",
        "https:///path",
        "http://host:0x10/",
        "http://host:65536",
        "https://[host/",
    ],
)
def test_a_hook_that_is_no_command_and_no_url_is_refused(hook: str) -> None:
    with pytest.raises(UserError, match="--on-event"):
        check_hooks([hook])


def test_a_hook_that_fails_costs_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_DELAYS", (0.0,))
    told = Hooks(["false", "http://127.0.0.1:1/"])
    told.tell({"event": "finish"})
    told.finish()
    assert sorted(record.levelname for record in caplog.records) == ["WARNING", "WARNING"]


def test_a_hook_that_kills_its_process_group_does_not_end_training() -> None:
    """`trap "kill 0" EXIT`, with which a script ends what it started."""
    program = (
        "from rungs.integrations import hooks\n"
        "told = hooks.Hooks([\"sh -c 'kill -9 0'\"])\ntold.tell({})\ntold.finish()"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, start_new_session=True, check=False)
    assert ended.returncode == 0
    assert b"exit code -9" in ended.stderr


def test_what_a_hook_that_hangs_has_started_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_SECONDS_PER_COMMAND", 0.5)
    alive = tmp_path / "alive"
    script = f"(sleep 1.5; touch {shlex.quote(str(alive))}) & wait"
    told = Hooks([shlex.join(["sh", "-c", script])])
    told.tell({})
    told.finish()
    time.sleep(1.5)
    assert not alive.exists()


def test_a_webhook_gets_json() -> None:
    received: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        told = Hooks([f"HTTP://127.0.0.1:{server.server_port}/hook"])
        told.tell({"event": "spike", "step": 7})
        told.finish()
        thread.join()
    assert received == [{"event": "spike", "step": 7}]


class Server:
    """Answers each connection as it is told, and keeps what it received."""

    def __init__(self, *answers: Callable[[socket.socket], None]) -> None:
        self.received: list[bytes] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._serve, args=answers, daemon=True).start()

    def _serve(self, *answers: Callable[[socket.socket], None]) -> None:
        for answer in answers:
            connection, _ = self._listener.accept()
            with connection:
                self.received.append(connection.recv(4096))
                with contextlib.suppress(OSError):
                    answer(connection)


def accept(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")


def reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_webhook_whose_connection_is_reset_is_tried_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_DELAYS", (0.0, 0.0))
    server = Server(reset, accept)
    told = Hooks([f"http://user:pass%20word@{server.host}/hook"])
    told.tell({"event": "finish"})
    told.finish()
    assert caplog.records == []
    assert len(server.received) == 2
    assert base64.b64encode(b"user:pass word") in server.received[1]


def test_what_a_hook_runs_ends_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what it has started, and without an event more."""
    monkeypatch.setattr(hooks, "_SECONDS_AT_END", 0.5)
    begun, alive = tmp_path / "begun", tmp_path / "alive"
    script = f"echo >> {shlex.quote(str(begun))}; (sleep 2; touch {shlex.quote(str(alive))}) & wait"
    told = Hooks([shlex.join(["sh", "-c", script])])
    for _ in range(3):
        told.tell({})
    told.finish()
    time.sleep(2.5)
    assert not alive.exists()
    assert begun.read_text() == "\n"
    assert caplog.messages == [
        "--on-event sh: ended before it was told everything, 0.5 s after the run"
    ]


@pytest.mark.parametrize(
    "hook",
    [
        "https://planted@127.0.0.1:1/planted?token=planted#planted",
        "https://user:planted@127.0.0.1:1/",
        "https://user:planted/rest@127.0.0.1:1/",  # a slash in the password
        "http://127.0.0.1:1/services/planted",
        "htps://user:planted@127.0.0.1:1/planted?x=planted",  # a slip
        "false --header planted",
        "no-such-program 'planted",
        "HOOK_TOKEN=planted true",
    ],
)
def test_no_message_has_the_secrets_of_a_hook(
    hook: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "_DELAYS", (0.0,))
    said = ""
    try:
        check_hooks([hook])
    except UserError as error:
        said = str(error)
    else:
        told = Hooks([hook])
        told.tell({"event": "finish"})
        told.finish()
        said = caplog.text
    assert "--on-event" in said
    assert "planted" not in said

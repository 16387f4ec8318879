"""The page's server gets requests that no browser sends."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from rungs.report.run_page import PageServer


class Server(PageServer):
    def whole_page(self) -> str:
        return "the page"

    def changes(self, since: int) -> str:
        return f"{since}"


@pytest.fixture
def server() -> Iterator[PageServer]:
    with Server([]) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer(server: PageServer, request: bytes) -> bytes:
    """Return the first line of the answer to a request, `HOST` standing for the address."""
    with socket.create_connection(server.server_address) as connection:  # type: ignore[arg-type]
        connection.sendall(request.replace(b"HOST", f"127.0.0.1:{server.server_port}".encode()))
        connection.shutdown(socket.SHUT_WR)
        return connection.makefile("rb").readline().strip()


def get(target: bytes) -> bytes:
    return b"GET " + target + b" HTTP/1.1\r\nHost: HOST\r\n\r\n"


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (get(b"/"), b"200"),
        (get(b"/changes?since=" + b"9" * 5000), b"200"),
        (get(b"/changes?since=-1&since=x&%=\xff"), b"200"),
        (get(b"//["), b"404"),
        (get(b"/").replace(b"Host: HOST\r\n", b""), b"403"),
        (b"\x16\x03\x01\x02\x00\r\n", b"<!DOCTYPE HTML>"),  # TLS
        (b"", b""),
    ],
)
def test_odd_requests_get_an_answer(
    server: PageServer, request_bytes: bytes, status: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    first = answer(server, request_bytes)
    assert status in first if status else not first
    assert answer(server, get(b"/")).endswith(b"200 OK")
    assert capfd.readouterr().err == ""


def test_a_browser_that_goes_away_is_no_error(
    server: PageServer, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(5):
        connection = socket.create_connection(server.server_address)  # type: ignore[arg-type]
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(get(b"/").replace(b"HOST", b"localhost:%d" % server.server_port))
        connection.close()  # resets it
    assert answer(server, get(b"/")).endswith(b"200 OK")
    assert capfd.readouterr().err == ""


def test_another_failure_is_one_line(
    server: PageServer, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise ValueError("metrics.jsonl: gone")

    monkeypatch.setattr(server, "whole_page", fail)
    assert answer(server, get(b"/")) == b""
    assert capfd.readouterr().err == "the page was not sent: metrics.jsonl: gone\n"

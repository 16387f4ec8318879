"""`serve.py` as a process: hostile clients, signals, a run that trains, the page in a browser."""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from tests.support.committed_runs import ROOT
from tests.support.layered_model import write_model

pytestmark = pytest.mark.long
LEAK = 4 << 20
"""Bytes that memory would grow by with each 500 connections if they left something behind. What is
compiled for more requests at a time, and threads that start, grow it too: on a busy machine with
each of the first 3,000 connections, on a quiet one with few after 2,000."""


class Process(NamedTuple):
    process: subprocess.Popen[str]
    port: int

    @property
    def client(self) -> Any:
        url = f"http://127.0.0.1:{self.port}/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=60)

    @property
    def memory(self) -> int:
        """Resident bytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found
        return int(found[1]) * 1024

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)


@contextlib.contextmanager
def serving(*arguments: object) -> Iterator[Process]:
    command = [sys.executable, str(ROOT / "serve.py"), *map(str, arguments), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            found = re.search(r":(\d+)/ answers for", process.stdout.readline())
            assert found
            yield Process(process, int(found[1]))
        finally:
            process.kill()


def request(body: bytes) -> bytes:
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def test_hostile_clients_harm_nobody(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    with serving(model) as server:
        ask = {"model": "model", "prompt": "hello", "max_tokens": 8, "temperature": 0}
        text = server.client.completions.create(**ask).choices[0].text
        for body in (
            b'"' + b"a" * (2 << 20),
            json.dumps(ask | {"prompt": "a " * 400_000}).encode(),
        ):
            with server.connect() as connection, contextlib.suppress(ConnectionError):
                connection.sendall(request(body))
                assert connection.recv(12) == b"HTTP/1.1 400"
        assert any(abuse(server, ask, text) < LEAK for _ in range(16)), (
            "memory grew with each 500 connections"
        )


def abuse(server: Process, ask: dict[str, Any], text: str) -> int:
    """Bytes by which the server's memory grew with 500 connections, none of them a client's; it
    still answers `ask` with `text`."""
    endless = json.dumps({"model": "model", "prompt": "a", "stream": True, "ignore_eos": True})
    sent = (b"", b"\x00\xff" * 40, request(endless.encode()), request(b"[" * 1000))
    before = server.memory
    for number in range(500):
        with server.connect() as connection:
            connection.sendall(sent[number % 4])
    assert server.client.completions.create(**ask).choices[0].text == text
    return server.memory - before


def test_a_signal_lets_answers_end(tmp_path: Path) -> None:
    number = signal.SIGINT
    model = write_model(tmp_path / "model", context_length=1024)
    with serving(model) as server:
        keys: dict[str, Any] = {"model": "model", "prompt": "a", "max_tokens": 900}
        stream = server.client.completions.create(
            **keys, stream=True, extra_body={"ignore_eos": True}
        )
        events = iter(stream)
        next(events)
        server.process.send_signal(number)
        *_, last = events
        assert last.choices[0].finish_reason == "length"
        assert server.process.wait(60) in (-number, 128 + number, 0)
        with pytest.raises(ConnectionError):
            server.connect()


def test_a_run_is_followed_while_it_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = write_model(run / "checkpoints" / "20260101T000000Z-step-000001")
    second = write_model(run / "checkpoints" / "20260101T000001Z-step-000002")
    latest = run / "checkpoints" / "latest"
    latest.symlink_to(first.name)
    with serving(run, "--follow") as server:
        keys = {"model": "run", "prompt": "a", "max_tokens": 60}
        assert server.client.models.retrieve("run").weights == first.name
        stream = server.client.completions.create(**keys, stream=True)
        latest.unlink()
        latest.symlink_to(second.name)
        shutil.rmtree(first)
        assert list(stream)[-1].choices[0].finish_reason
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            answer = server.client.completions.create(**keys)
            if answer.system_fingerprint == second.name:
                return
    pytest.fail("the new checkpoint was not taken")


def test_the_page_shows_two_answers(tab: Any, tmp_path: Path) -> None:
    models = [write_model(tmp_path / name, context_length=256) for name in ("one", "two")]
    with serving(*models) as server:
        tab.goto(f"http://127.0.0.1:{server.port}/")
        tab.wait_for_selector("h2")
        assert tab.locator("h2").all_inner_texts() == ["one · one", "two · two"]
        tab.fill("#prompt", "hello")
        tab.fill("#max_tokens", "40")
        tab.click("#send")
        tab.wait_for_selector(".figures >> nth=1")
        tab.wait_for_selector("#send:visible")
        figures = tab.locator(".figures").all_inner_texts()
        assert all(re.match(r"\d+ tokens in .* per second; ", text) for text in figures), figures
        keys: dict[str, Any] = {"prompt": "hello", "seed": 0, "temperature": 0.8, "top_p": 0.95}
        answer = server.client.completions.create(model="two", max_tokens=40, **keys)
        assert tab.locator(".answer").nth(1).inner_text() == "hello" + answer.choices[0].text


def test_the_page_shows_what_the_server_refuses(chromium: Any, tmp_path: Path) -> None:
    with serving(write_model(tmp_path / "model")) as server:
        page = chromium.new_page()
        page.goto(f"http://127.0.0.1:{server.port}/")
        page.wait_for_selector("h2")
        page.fill("#prompt", "hello")
        page.fill("#max_tokens", "4000")
        page.click("#send")
        page.wait_for_selector(".figures.bad")
        assert "the model's context of 64" in page.locator(".figures.bad").inner_text()
        page.close()


def test_other_machines_need_a_key(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    key, short = tmp_path / "key", tmp_path / "short"
    key.write_text("a key that nobody has\n")
    short.write_text("short")
    for options, problem in (
        (["--host", "0.0.0.0"], "--host: other machines may call it; add --key-file FILE"),
        (["--key-file", short], "must hold a key of at least 16 printable ASCII characters"),
        (["--key-file", tmp_path / "gone"], "gone: no such file"),
    ):
        command = [sys.executable, str(ROOT / "serve.py"), str(model), *map(str, options)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert problem in done.stderr
        assert len(done.stderr.splitlines()) == 1
    with serving(model, "--host", "0.0.0.0", "--key-file", key) as server:
        with pytest.raises(urllib.request.HTTPError):
            urllib.request.urlopen(f"http://127.0.0.1:{server.port}/v1/models")
        client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key.read_text().strip()
        )
        assert [found.id for found in client.models.list()] == ["model"]


def test_another_site_can_not_use_a_browser_here(tmp_path: Path) -> None:
    with serving(write_model(tmp_path / "model")) as server:
        asked = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/v1/models", headers={"Host": "evil.example"}
        )
        with pytest.raises(urllib.request.HTTPError) as error:
            urllib.request.urlopen(asked)
        assert error.value.code == 400

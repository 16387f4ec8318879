"""A server in this process that answers for two small models."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest

from rungs.serving.app import App, Limits, listen, make_server
from rungs.serving.engine import Engine
from rungs.serving.served import Loading, Served
from tests.data.text.test_chat_template import CHATML
from tests.support.browser import chromium, tab  # noqa: F401 — fixtures
from tests.support.layered_model import write_model

KEY = "a key that nobody else has"
ROWS = 4


class Answering(NamedTuple):
    """A server that runs."""

    url: str
    engine: Engine
    models: dict[str, Served]

    @property
    def client(self) -> Any:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=KEY, max_retries=0, timeout=300)


@pytest.fixture(scope="package")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base model, and one with a chat template."""
    folder = tmp_path_factory.mktemp("models")
    base = write_model(folder / "base", n_kv_heads=2, n_heads=4, positions="rope")
    chat = write_model(folder / "chat", context_length=128)
    (chat / "chat_template.jinja").write_text(CHATML["source"])
    return {"base": base, "chat": chat}


@pytest.fixture(scope="package")
def answering(models: dict[str, Path]) -> Iterator[Answering]:
    served = {name: Served(str(place), Loading()) for name, place in models.items()}
    generators = {name: model.load() for name, model in served.items()}
    engine = Engine(generators, ROWS, most_waiting=32)
    limits = Limits(body_bytes=20_000, answer_seconds=300, texts=ROWS)
    listener = listen("127.0.0.1", 0)
    server = make_server(App(served, engine, limits, KEY, None), engine)
    engine.start()
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    yield Answering(f"http://127.0.0.1:{listener.getsockname()[1]}", engine, served)
    server.should_exit = True
    thread.join()
    engine.end()
    assert engine.error is None


def message(content: str, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": content}

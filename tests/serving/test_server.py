"""The server as its clients see it: OpenAI's, ordinary and hostile ones."""

import functools
import gc
import json
import math
import socket
import sys
import time
import urllib.request
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from click.testing import CliRunner
from flax import nnx
from starlette.testclient import TestClient

from rungs.checkpointing.load import load_generator, load_model, load_tokenizer
from rungs.cli import serve
from rungs.common.errors import UserError
from rungs.model.sampling import Sampling
from rungs.serving import app
from rungs.serving.engine import Engine, _Batch
from rungs.serving.served import Loading, Served, names_of
from tests.serving.conftest import KEY, ROWS, Answering, message
from tests.support.layered_model import write_model

PROMPT, NEW = "The river ", 24
SAMPLED = Sampling(temperature=0.9, top_p=0.8)
SAME: dict[str, Any] = {
    "model": "base",
    "temperature": 0.9,
    "top_p": 0.8,
    "seed": 5,
    "max_tokens": NEW,
}


generator_of = functools.cache(load_generator)


@functools.cache
def expected_texts(
    model: Path, samples: int = 1, prompt: str = PROMPT, tokens: int = NEW
) -> list[str]:
    """Return the texts that `generate.py` makes for the same request."""
    return generator_of(model).continue_texts([prompt] * samples, tokens, SAMPLED, seed=5)


def eventually(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.02)
    return is_so()


def post(answering: Answering, body: bytes, **headers: str) -> tuple[int, Any]:
    address = answering.url.removeprefix("http://")
    connection = HTTPConnection(address, timeout=60)
    given = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"} | headers
    connection.request("POST", "/v1/completions", body, given)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_texts_are_those_of_the_generator(answering: Answering, models: dict[str, Path]) -> None:
    answer = answering.client.completions.create(prompt=PROMPT, **SAME, n=3)
    assert [choice.text for choice in answer.choices] == expected_texts(models["base"], 3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.system_fingerprint == "base"


def test_a_stream_has_the_same_text(answering: Answering, models: dict[str, Path]) -> None:
    options = {"include_usage": True}
    events = list(
        answering.client.completions.create(
            prompt=PROMPT, **SAME, stream=True, stream_options=options
        )
    )
    texts = [choice.text for event in events for choice in event.choices]
    assert len(texts) > 1
    assert "".join(texts) == expected_texts(models["base"])[0]
    finishes = [choice.finish_reason for event in events for choice in event.choices]
    assert finishes[:-1] == [None] * (len(finishes) - 1)
    assert finishes[-1] in ("stop", "length")
    assert events[-1].usage is not None


def test_many_clients_at_once_get_their_own_texts(
    answering: Answering, models: dict[str, Path]
) -> None:
    prompts = [PROMPT * (1 + n % 3) + str(n) for n in range(6)]
    keys = SAME | {"max_tokens": 12}

    def ask(prompt: str) -> str:
        return answering.client.completions.create(prompt=prompt, **keys).choices[0].text

    with ThreadPoolExecutor(len(prompts)) as pool:
        found = list(pool.map(ask, prompts))
    for prompt, text in zip(prompts, found, strict=True):
        assert [text] == expected_texts(models["base"], prompt=prompt, tokens=12)
    assert eventually(lambda: answering.engine.running == 0)


def test_a_chat_is_rendered_by_its_template(answering: Answering, models: dict[str, Path]) -> None:
    keys = SAME | {"model": "chat"}
    answer = answering.client.chat.completions.create(messages=[message("Hi")], **keys)
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert [answer.choices[0].message.content] == expected_texts(models["chat"], prompt=prompt)
    events = answering.client.chat.completions.create(
        messages=[message("Hi")],
        stream=True,
        logprobs=True,
        top_logprobs=2,
        **keys,
    )
    choices = [choice for event in events for choice in event.choices]
    assert [choice.delta.role for choice in choices[:2]] == ["assistant", None]
    pieces = [choice.delta.content or "" for choice in choices]
    assert "".join(pieces) == answer.choices[0].message.content
    found = [one for choice in choices if choice.logprobs for one in choice.logprobs.content or []]
    assert {len(one.top_logprobs) for one in found} == {2}
    assert all(one.logprob <= one.top_logprobs[0].logprob for one in found)


def test_prompts_may_be_tokens(answering: Answering, models: dict[str, Path]) -> None:
    tokens = load_tokenizer(models["base"]).encode(PROMPT)
    for prompt in (tokens, [tokens], [PROMPT]):
        answer = answering.client.completions.create(prompt=prompt, **SAME)
        assert answer.choices[0].text == expected_texts(models["base"])[0]


def test_a_stop_string_ends_the_text_before_it(
    answering: Answering, models: dict[str, Path]
) -> None:
    [whole] = expected_texts(models["base"])
    stop = whole[4:6]
    answer = answering.client.completions.create(prompt=PROMPT, **SAME, stop=[stop, "never"])
    assert answer.choices[0].text == whole[: whole.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert eventually(lambda: answering.engine.running == 0)


def test_an_echo_scores_the_prompt(answering: Answering, models: dict[str, Path]) -> None:
    """What the lm-evaluation-harness asks for."""
    keys = {"model": "base", "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    answer = answering.client.completions.create(**keys, logprobs=1, echo=True)
    found = answer.choices[0].logprobs
    assert found is not None
    tokens = load_tokenizer(models["base"]).encode(PROMPT)
    logits_SV = np.asarray(nnx.jit(load_model(models["base"]))(jnp.array([tokens])))[0]
    assert len(found.tokens or []) == len(tokens) + 1
    assert answer.choices[0].text.startswith(PROMPT)
    for place, (row, token) in enumerate(
        zip(logits_SV, [*tokens[1:], logits_SV[-1].argmax()], strict=True)
    ):
        log_probs = row - row.max()
        log_probs -= math.log(np.exp(log_probs).sum())
        assert (found.token_logprobs or [])[place + 1] == pytest.approx(log_probs[token], abs=1e-4)
        [top] = (found.top_logprobs or [])[place + 1].values()
        assert top == pytest.approx(log_probs.max(), abs=1e-4)
    assert (found.token_logprobs or [])[0] is None


@pytest.mark.parametrize(
    ("body", "status", "problem"),
    [
        (b"{", 400, "Expecting"),
        (b"[" * 19_000, 400, "nested"),
        (b"[]", 400, "must be an object"),
        (b"\xff", 400, "decode"),
        (b'{"model": "base", "prompt": "a", "logit_bias": {"1": 1}}', 400, "logit_bias is not"),
        (b'{"model": "bse", "prompt": "a"}', 404, "did you mean base?"),
        (b'{"model": "base", "prompt": "%s"}' % (b"a" * 100), 400, "the model's context of 64"),
        (b'{"model": "base", "prompt": "a", "max_tokens": 65}', 400, "65 new ones"),
        (b'{"model": "base", "prompt": [257]}', 400, "token id 257"),
        (b'{"model": "base", "prompt": [[]]}', 400, "has no token"),
        (b'{"model": "base", "prompt": "\\ud800"}', 400, "lone surrogate"),
        (b'{"model": "base", "prompt": "a", "n": 5}', 400, "1 prompts × 5"),
        (b'{"model": "base", "prompt": "a", "temperature": -1}', 400, "temperature: -1"),
        (b'{"model": "base", "prompt": "%s"}' % (b"a" * 30_000), 400, "20,000 bytes"),
    ],
)
def test_wrong_requests_get_one_line(
    answering: Answering, body: bytes, status: int, problem: str
) -> None:
    found, answer = post(answering, body)
    assert (found, "\n" in answer["error"]["message"]) == (status, False)
    assert problem in answer["error"]["message"]


def test_a_chat_needs_a_template(answering: Answering) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        answering.client.chat.completions.create(model="base", messages=[message("a")])


def test_a_form_of_answers_needs_a_library(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    form = {"type": "json_object"}
    with pytest.raises(openai.BadRequestError, match="uv sync --extra structured"):
        answering.client.chat.completions.create(
            model="chat", messages=[message("a")], response_format=form
        )


def test_an_answer_without_tokens_is_refused(answering: Answering) -> None:
    """It would never end."""
    keys = {"model": "chat", "messages": [message("a")], "max_tokens": 0}
    with pytest.raises(
        openai.BadRequestError, match="max_tokens: Input should be greater than or equal to 1"
    ):
        answering.client.chat.completions.create(**keys)


def test_huge_numbers_leave_the_server_alive(answering: Answering) -> None:
    for key, value in (("top_k", 2**70), ("seed", 2**70), ("seed", -1)):
        keys = SAME | {"extra_body": {key: value}}
        assert answering.client.completions.create(prompt=PROMPT, **keys).choices[0].text
    assert answering.engine.is_alive()


def test_only_clients_with_the_key_are_answered(answering: Answering) -> None:
    for path in ("/v1/models", "/v1/models/base"):
        with pytest.raises(urllib.request.HTTPError) as error:
            urllib.request.urlopen(answering.url + path)
        assert error.value.code == 401
    for authorization in ("Bearer wrong", "Bearer", KEY, f"Basic {KEY}"):
        assert post(answering, b"{}", Authorization=authorization)[0] == 401
    assert post(answering, b"{}", Authorization=f"bearer  {KEY}")[0] == 400
    assert post(answering, b"{}", **{"Content-Type": "text/plain"})[0] == 400
    for path in ("/health", "/"):
        assert urllib.request.urlopen(answering.url + path).status == 200


def test_models_are_listed(answering: Answering) -> None:
    assert [model.id for model in answering.client.models.list()] == ["base", "chat"]
    assert answering.client.models.retrieve("chat").id == "chat"
    with pytest.raises(openai.NotFoundError, match="did you mean chat"):
        answering.client.models.retrieve("chatt")


def test_a_client_that_leaves_frees_its_row(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = {"prompt": "a", "model": "base", "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    streams = [answering.client.completions.create(**endless, stream=True) for _ in range(ROWS + 2)]
    for stream in streams:
        next(iter(stream))
    engine = answering.engine
    assert eventually(lambda: engine.running == engine.waiting == 0)
    monkeypatch.setattr(_Batch, "_deliver", lambda *_: None)  # texts that never end
    content = json.dumps({"prompt": "a", "model": "base", "max_tokens": 60})
    head = f"Host: x\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
    host, port = answering.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as leaving:
        request = f"POST /v1/completions HTTP/1.1\r\n{head}Content-Length: {len(content)}\r\n"
        leaving.sendall(f"{request}\r\n{content}".encode())
        assert eventually(lambda: engine.running == 1)
    assert eventually(lambda: engine.running == 0)
    stream = answering.client.completions.create(**endless, stream=True)
    assert eventually(lambda: engine.running == 1)
    stream.close()
    assert eventually(lambda: engine.running == 0)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        *[("127.0.0.1:8000", 200), ("LOCALHOST", 200), ("[::1]:80", 200)],
        *[("evil.example", 400), ("127.0.0.1.evil.example:8000", 400), ("", 400), ("[::2]", 400)],
    ],
)
def test_other_names_of_this_machine_are_refused_in_json(host: str, status: int) -> None:
    routes = app.App({}, Engine({}, 1, 1), app.Limits(), None, [*serve.LOOPBACK]).asgi
    answer = TestClient(routes).get("/v1/models", headers={"Host": host})
    assert answer.status_code == status
    if status == 400:
        error = answer.json()["error"]
        assert error["type"] == "invalid_request_error"
        hint = "call it 127.0.0.1, or start the server with --key-file FILE for any name"
        assert error["message"] == f"Host: {host!r}; {hint}"


def test_the_start_says_what_it_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rungs.parallel.jax_setup.enable_compilation_cache", lambda: None)
    monkeypatch.setattr("rungs.serving.app.answer_until_signal", lambda *_: None)
    monkeypatch.setattr(Engine, "warm_up", lambda _: None)
    model = write_model(tmp_path / "model")
    done = CliRunner().invoke(serve.main, [str(model), "--port", "0"], catch_exceptions=False)
    loading, compiling, compiled, answering = done.stderr.splitlines()
    assert loading == "loading; Ctrl-C ends it at once"
    assert compiling.startswith("compiling, which takes")
    assert compiled.startswith("compiled in ")
    assert answering == "Ctrl-C lets answers end; a second Ctrl-C doesn't wait for them"


def test_a_host_that_can_not_be_is_one_line() -> None:
    with pytest.raises(UserError, match="choose another"):
        app.listen("a" * 70, 0)


def test_another_model_in_the_place_of_a_run_is_not_taken(tmp_path: Path) -> None:
    """Its weights would not fit the programs, and end the server."""
    checkpoints = tmp_path / "run" / "checkpoints"
    write_model(checkpoints / "one")
    (checkpoints / "latest").symlink_to("one")
    served = Served(str(checkpoints.parent), Loading(follow=True))
    assert served.newer() is None
    kinds: tuple[tuple[str, dict[str, int]], ...] = (
        ("same", {}),
        ("wider", {"emb_dim": 32}),
        ("longer", {"context_length": 128}),
    )
    for name, changes in kinds:
        write_model(checkpoints / name, **changes)
        (checkpoints / "latest").unlink()
        (checkpoints / "latest").symlink_to(name)
        with pytest.raises(UserError, match="another model") if changes else nullcontext():
            assert served.newer() is not None
        assert served.step == "same"


def test_more_texts_than_may_wait_are_refused(answering: Answering) -> None:
    keys = {"model": "base", "prompt": "a", "max_tokens": 60, "extra_body": {"ignore_eos": True}}

    def ask(_: int) -> str | None:
        try:
            answering.client.completions.create(**keys, n=ROWS)
        except openai.RateLimitError as error:
            return error.response.headers["Retry-After"]
        return None

    with ThreadPoolExecutor(14) as pool:
        waits = list(pool.map(ask, range(14)))
    assert set(waits) == {None, "1"}


def test_new_weights_answer_without_dropping_a_text(
    answering: Answering, models: dict[str, Path]
) -> None:
    """A text in progress ends with the weights that it began with, and says so."""
    served = answering.models["base"]
    newer = served.load()
    newer.generator.weights = jax.tree.map(lambda array: 2 * array, newer.generator.weights)
    stream = answering.client.completions.create(prompt=PROMPT, **SAME, stream=True)
    events = [next(iter(stream))]
    answering.engine.replace("base", newer._replace(name="newer"))
    events += stream
    text = "".join(event.choices[0].text for event in events)
    assert text == expected_texts(models["base"])[0]
    assert {event.system_fingerprint for event in events} == {"base"}
    answer = answering.client.completions.create(prompt=PROMPT, **SAME)
    assert answer.choices[0].text != text
    assert answer.system_fingerprint == "newer"
    answering.engine.replace("base", served.load())


def test_weights_that_no_text_has_are_freed_without_a_request(answering: Answering) -> None:
    batch, arrays = answering.engine._batches["base"], []
    for _ in range(3):
        new = answering.models["base"].load()
        arrays.append(weakref.ref(jax.tree.leaves(new.generator.weights)[0]))
        answering.engine.replace("base", new)
        assert eventually(lambda: batch.newer is None)
    del new
    gc.collect()
    assert [array() is None for array in arrays] == [True, True, False]


def test_models_are_named_by_run_and_checkpoint() -> None:
    assert names_of(["runs/layers", "other/llama/"]) == ["layers", "llama"]
    assert names_of(["runs/a/checkpoints/latest", "runs/a"]) == ["a/latest", "a"]
    with pytest.raises(ValueError, match="a: 2 models have this name"):
        names_of(["runs/a", "more/a"])

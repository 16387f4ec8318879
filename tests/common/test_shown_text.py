"""What messages leave out, and what a terminal gets instead of control characters."""

import json
import time
import urllib.parse

import pytest

from rungs.common import shown_text
from rungs.common.errors import UserError, reason
from rungs.common.shown_text import counted, shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://key:planted@host/bucket: 403", "s3://***@host/bucket: 403"),
        ("ftp://pl/an@ted@host/x", "ftp://***@host/x"),
        ("GET https://host/x?sig=planted&y=1 failed", "GET https://host/x?*** failed"),
        ("'https://host/x#planted'", "'https://host/x#***'"),
        ("Authorization: Bearer planted, then", "Authorization: Bearer ***, then"),
        ("{'authorization': 'Basic planted'}", "{'authorization': 'Basic ***'}"),
        ("password=planted", "password=***"),
        ("hf_abcdefghijklmnopqrst is wrong", "*** is wrong"),
        (
            "eos_token: </s>, token 17, s3://bucket/run",
            "eos_token: </s>, token 17, s3://bucket/run",
        ),
    ],
)
def test_secrets_are_left_out(text: str, expected: str) -> None:
    assert shown(text) == expected
    assert str(UserError(text)) == expected
    assert reason(OSError(text)) == expected


@pytest.mark.parametrize("path", ["secret", "./keys/api-key", "--key-file=a/api_key"])
def test_a_message_about_a_path_is_no_header(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["serve.py", path])
    named = path.removeprefix("--key-file=").removeprefix("./")
    for text in (f"{named}: cannot be read: password: ***", f"one line\n{named}: no such file"):
        assert shown_text.without_secrets(text.replace("***", "hunter2")) == text
    name = named.rpartition("/")[2]
    assert shown_text.without_secrets(f"sent {name}: planted") == f"sent {name}: ***"


def test_values_of_the_environment_and_the_command_line_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "planted-1")
    monkeypatch.setenv("WANDB_API_KEY", "planted-2")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:planted%203@proxy:3128")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "warning")
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/agent")
    monkeypatch.setattr("sys.argv", ["train.py", "--mirror", "s3://k:planted-4@host/?k=planted-5"])
    text = "planted-1 planted-2 planted 3 planted%203 planted-4 planted-5 warning /tmp/agent"
    assert shown(text) == "*** *** *** *** *** *** warning /tmp/agent"


def test_a_secret_is_left_out_in_quotes(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = 'pa"ss\\wörd'
    monkeypatch.setenv("MY_TOKEN", secret)
    for text in (json.dumps(secret), json.dumps(secret, ensure_ascii=False), repr(secret)):
        assert shown(f"learning_rate: {text} is not allowed").replace("'", '"') == (
            'learning_rate: "***" is not allowed'
        )


def test_a_password_with_a_slash_is_left_out_where_a_library_takes_its_start_for_a_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--mirror", "ftp://user:planted/rest@host/x"])
    with pytest.raises(ValueError, match="planted") as raised:
        _ = urllib.parse.urlsplit("ftp://user:planted/rest@host/x").port
    assert "planted" not in reason(raised.value)


def test_long_texts_take_no_time() -> None:
    started = time.monotonic()
    for part in ("a", "a://", "a://b@", "password ", "\x1b"):
        shown(part * (200_000 // len(part)))
    assert time.monotonic() - started < 5


def test_control_characters_are_visible() -> None:
    text = "\x1b]0;title\x07\x9b31m\r\u202egpj\x7f\ud800"
    assert shown(text) == r"\x1b]0;title\x07\x9b31m\r\u202egpj\x7f\ud800"
    kept = "a\tb\nc é 語 \u200d👩\u200d🔬"
    assert shown_text.visible(kept) == kept


@pytest.mark.parametrize(
    ("count", "thing", "text"),
    [
        (1, "step", "1 step"),
        (0, "step", "0 steps"),
        (2000, "token", "2,000 tokens"),
        (1, "microbatch", "1 microbatch"),
        (2, "microbatch", "2 microbatches"),
        (2, "process", "2 processes"),
    ],
)
def test_a_count_has_the_singular_only_for_one(count: int, thing: str, text: str) -> None:
    assert counted(count, thing) == text

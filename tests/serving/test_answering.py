"""What a client gets of what the engine delivers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rungs.data.text.tokenizer import train_bpe
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.serving.answering import _Choice, event_lines
from rungs.serving.engine import Delivery
from rungs.serving.protocol import Body, ChatBody, CompletionBody, token_text
from rungs.serving.slots import LogProbs

TOKENIZERS = Path(__file__).parents[1] / "fixtures" / "tokenizers"
ASK: dict[str, Any] = {"model": "m"}


@pytest.mark.parametrize(
    ("body", "entries"),
    [
        (CompletionBody(**ASK, prompt="a", logprobs=1), 3),
        (ChatBody(**ASK, messages=[], logprobs=True), 2),
    ],
)
def test_completions_name_the_token_that_ends_them(body: Body, entries: int) -> None:
    """The lm-evaluation-harness leaves out the last token, which it asked for beyond the text."""
    served: Any = SimpleNamespace(tokenizer=train_bpe([], 257))
    one = LogProbs(np.array(-1.0), np.array([-1.0]), np.array([65]))
    choice = _Choice(served, body, [65], 0)
    text, found = choice.add(Delivery([65, 66], [one] * 3, "stop", stop_token=[0]))
    assert len(found or []) == entries
    assert (choice.count, choice.finish) == (2, "stop")
    assert len(text) == 2


@pytest.mark.parametrize("pieces", [[4], [1, 1, 1, 1], [2, 2]])
def test_tokens_after_a_stop_string_are_neither_counted_nor_shown(pieces: list[int]) -> None:
    served: Any = SimpleNamespace(tokenizer=train_bpe([], 257))
    one = LogProbs(np.array(-1.0), np.array([-1.0]), np.array([65]))
    choice = _Choice(served, CompletionBody(**ASK, prompt="a", stop="bc", logprobs=1), [65], 0)
    tokens, entries, text = served.tokenizer.encode("abcd"), 0, ""
    while pieces and not choice.finish:
        count = pieces.pop(0)
        new, found = choice.add(Delivery(tokens[:count], [one] * count))
        del tokens[:count]
        text, entries = text + new, entries + len(found or [])
    assert (text, choice.finish, choice.count, entries) == ("a", "stop", 3, 3)


def test_tokens_that_differ_in_a_space_have_different_names() -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "mistral")
    one, two = tokenizer.encode("a a")[-1], tokenizer.continuing.encode("a")[0]
    assert [token_text(tokenizer, token) for token in (one, two)] == [(" a", b" a"), ("a", b"a")]


@pytest.mark.parametrize("family", ["gpt2", "mistral"])
def test_an_echo_is_the_prompt_without_what_the_tokenizer_adds(family: str) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / family)
    served: Any = SimpleNamespace(tokenizer=tokenizer)
    prompt, answer = tokenizer.encode_prompt("model of é"), tokenizer.encode("é 🙂 of it")
    one = LogProbs(np.array(-1.0), np.array([-1.0]), np.array([65]))
    choice = _Choice(served, CompletionBody(**ASK, prompt="a", logprobs=1, echo=True), prompt, 0)
    text, found = choice.add(Delivery([], [None] + [one] * (len(prompt) - 1)))
    assert text == tokenizer.decode(prompt[len(tokenizer.begin) :])
    assert [each.log_prob for each in found or []] == [None] + [-1.0] * (len(prompt) - 1)
    more, rest = choice.add(Delivery(answer, [one] * len(answer), "length"))
    assert tokenizer.decode([*prompt, *answer], skip_special_tokens=True).endswith(text + more)
    assert len(rest or []) == len(answer)


def test_an_event_is_one_line_to_every_client() -> None:
    value = {"text": "a\u0085b\u2028c\u2029d\u00e9\n\x1c"}
    line, empty = event_lines(value).splitlines()
    assert (json.loads(line.removeprefix("data: ")), empty) == (value, "")

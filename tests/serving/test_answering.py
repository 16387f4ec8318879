"""What a client gets of what the engine delivers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rungs.data.text.tokenizer import Tokenizer, train_bpe
from rungs.data.text.tokenizer_files import load_tokenizer
from rungs.serving.answering import TokenOffsets, _Choice
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


def test_log_probabilities_end_with_the_text_if_that_settles_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tokenizer, "decode_settled", lambda *_: "")
    served: Any = SimpleNamespace(tokenizer=train_bpe([], 257))
    one = LogProbs(np.array(-1.0), np.array([-1.0]), np.array([65]))
    choice = _Choice(served, CompletionBody(**ASK, prompt="a", stop="bc", logprobs=1), [65], 0)
    tokens = served.tokenizer.encode("abcdefg")
    shown = [choice.add(Delivery([token], [one])) for token in tokens]
    assert [text for text, _ in shown] == [""] * 7
    text, _ = choice.add(Delivery([], [], "length"))
    assert (text, choice.count, choice.surplus) == ("a", 3, 4)


PROMPTS = "the model of  é→x 🙂, y", "  hi, you", " a"


@pytest.mark.parametrize("family", ["gpt2", "mistral", "llama3", "gemma"])
@pytest.mark.parametrize("is_echoed", [True, False])
@pytest.mark.parametrize("text", PROMPTS)
def test_offsets_lead_to_the_tokens_in_the_text(family: str, is_echoed: bool, text: str) -> None:
    tokenizer = load_tokenizer(TOKENIZERS / family)
    body = CompletionBody(**ASK, prompt=text, logprobs=1, echo=is_echoed)
    served: Any = SimpleNamespace(tokenizer=tokenizer)
    prompt, answer = tokenizer.encode_prompt(text), tokenizer.encode("é 🙂 of it")
    asked = tokenizer.decode(prompt[len(tokenizer.begin) :]) * is_echoed
    one = LogProbs(np.array(-1.0), np.array([-1.0]), np.array([65]))
    choice = _Choice(served, body, prompt, 0)
    text, found = choice.add(Delivery([], [one] * len(prompt), None)) if is_echoed else ("", [])
    assert text == asked
    more, rest = choice.add(Delivery(answer, [one] * len(answer), "length"))
    text, entries = text + more, [*(found or []), *(rest or [])]
    assert len(entries) == len(prompt) * is_echoed + len(answer)
    begun = b"".join(each.content for each in entries).decode()
    assert begun in (text, f" {text}")  # some decoders drop the first space
    for place, each in enumerate(entries):
        if each.content and not each.name.startswith("bytes:"):
            is_first = is_echoed and place <= len(tokenizer.begin)
            is_dropped = is_first and begun != text
            name = each.name.removeprefix(" ") if is_dropped else each.name
            assert text[each.offset :].startswith(name)


def test_offsets_count_special_tokens_in_an_echo_and_each_byte_of_no_character() -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "mistral")
    hi, a = tokenizer.encode("</s> hi")[-1], tokenizer.encode("a a")[-1]
    offsets = TokenOffsets(tokenizer, [])
    assert [offsets.add(2, "</s>"), offsets.add(hi, ""), offsets.add(a, "")][:2] == [0, 4]
    [wrong] = [n for n in range(300) if tokenizer.bytes_of(n) == b"\xe6" and tokenizer.is_byte(n)]
    offsets = TokenOffsets(tokenizer, [a])
    assert [offsets.add(n, "") for n in (wrong, wrong, a)] == [0, 0, 2]
    text = tokenizer.decode([a, wrong, wrong, a])
    assert text[len(tokenizer.decode([a])) :][2:] == tokenizer.bytes_of(a).decode()


def test_tokens_that_differ_in_a_space_have_different_names() -> None:
    tokenizer = load_tokenizer(TOKENIZERS / "mistral")
    one, two = tokenizer.encode("a a")[-1], tokenizer.continuing.encode("a")[0]
    assert [token_text(tokenizer, token) for token in (one, two)] == [(" a", b" a"), ("a", b"a")]

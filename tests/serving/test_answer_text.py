"""The text of an answer as its tokens arrive."""

import hypothesis
import hypothesis.strategies as st
import pytest
import tokenizers

from rungs.data.text.tokenizer import Tokenizer, train_bpe
from rungs.serving.answering import AnswerText

TOKENIZER: Tokenizer = train_bpe([], 257)
STOPS = ["ab", "bca", "cab", "a", "é!"]


@hypothesis.given(
    text=st.text("abcé! 😀", max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=1),
    stops=st.lists(st.sampled_from(STOPS), max_size=2),
)
@hypothesis.example(text="ccab!", sizes=[9], stops=["cab", "a"])
def test_pieces_make_the_text_before_the_first_stop_string(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    answer = AnswerText(TOKENIZER, TOKENIZER.encode("prompt é"), stops)
    tokens, pieces, place = TOKENIZER.encode(text), list[str](), 0
    while place < len(tokens) and not answer.is_stopped:
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(answer.add(tokens[place : place + size], place + size >= len(tokens)))
        place += size
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    whole = text[: ends[0]] if ends else text
    cut = max((len(stop) for stop in stops if whole.endswith(stop)), default=0)
    assert "".join(pieces) == answer.text == whole[: len(whole) - cut]
    assert answer.is_stopped == bool(ends)
    assert answer.tokens == TOKENIZER.encode(whole)


@pytest.mark.parametrize(
    ("stop", "text", "count"),
    [
        ("<|endoftext|>", "abc", 4),
        ("c<|endoftext|>", "ab", 4),
        ("<|endoftext|>d", "abc", 5),
        ("c<|endoftext|>de", "ab", 6),
        ("f", "abcde", 7),
        ("<|endoftext|>f", "abcdef", None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 7])
def test_stop_strings_may_hold_special_tokens(
    stop: str, text: str, count: int | None, size: int
) -> None:
    answer = AnswerText(TOKENIZER, TOKENIZER.encode("x"), [stop, "never"])
    tokens = TOKENIZER.encode("abc<|endoftext|>def")
    assert len(tokens) == 7
    pieces = [
        answer.add(tokens[place : place + size], place + size >= 7) for place in range(0, 7, size)
    ]
    assert "".join(pieces) == answer.text == text
    assert answer.is_stopped == (count is not None)
    assert answer.tokens == tokens[:count]


@pytest.mark.parametrize("name", ["<|end|>", "<|é|>"])
def test_names_that_are_text_stay_text(name: str) -> None:
    """A special token is found by its id; a byte-level decoder can't spell the name of another."""
    inner = tokenizers.Tokenizer.from_str(TOKENIZER.as_json())
    inner.add_special_tokens([name])
    tokenizer = Tokenizer(inner)
    text = "write <|endoftext|> last, "
    spelled = [token for letter in text for token in tokenizer.encode(letter)]
    answer = AnswerText(tokenizer, tokenizer.encode("x"), [f", {name}"])
    assert answer.add([*spelled, *tokenizer.encode(f"{name}y")], is_last=True) == text[:-2]
    assert answer.is_stopped


def test_a_character_arrives_whole() -> None:
    answer = AnswerText(TOKENIZER, TOKENIZER.encode("x"), [])
    *begin, end = TOKENIZER.encode("😀")
    assert [answer.add([token]) for token in begin] == ["", "", ""]
    assert answer.add([end]) == "😀"
    assert answer.add(begin) == ""
    assert answer.add([], is_last=True) == "\ufffd"

"""merge_pair, train_bpe and Tokenizer."""

import itertools
import json
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import regex
import tiktoken

from assignment.tests.mistakes import explained
from rungs.data.text.tokenizer_files import load_tokenizer

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SPECIAL = ["<|end|>", "<|user|>", "<|end|><|end|>"]
TEXT = (
    "The sailor can't say what he'd sell: sea shells, she'll say. 'll  'x''ve\n\n\tIt's 1,234½"
    " o'clock<|end|>\n\n  Zwölf große Boxkämpfer — 12 jagten 🙃🙃 日本語\u00a0 <|user|>sell sea"
    " shells<|end|><|end|> by the sea shore   <|end|><|end|><|end|> <|en d|>  \r\n \n"
)
Pair = tuple[bytes, bytes]


def naive_bpe(text: str, vocab_size: int, special: list[str]) -> list[Pair]:
    """Return the merges, by counting all pairs again each time."""
    documents = regex.split("|".join(map(regex.escape, sorted(special, key=len)[::-1])), text)
    words = Counter(word for document in documents for word in regex.findall(GPT2, document))
    split = {word: [bytes([byte]) for byte in word.encode()] for word in words}
    merges: list[Pair] = []
    while 256 + len(special) + len(merges) < vocab_size:
        counts: Counter[Pair] = Counter()
        for word, tokens in split.items():
            for pair in itertools.pairwise(tokens):
                counts[pair] += words[word]
        if not counts:
            break
        best = max(counts, key=lambda pair: (counts[pair], pair))
        merges.append(best)
        for tokens in split.values():
            at = 0
            while at < len(tokens) - 1:
                if (tokens[at], tokens[at + 1]) == best:
                    tokens[at : at + 2] = [best[0] + best[1]]
                at += 1
    return merges


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes((TEXT * 3 + "low lower lowest newest widest " * 5).encode())
    return path


def trained(code: ModuleType, path: Path, vocab_size: int = 400) -> tuple:
    return code.train_bpe(path, vocab_size, SPECIAL)


def test_merge_pair_goes_from_left_to_right(code: ModuleType) -> None:
    tokens = [b"a", b"a", b"a", b"b", b"a", b"a"]
    found = code.merge_pair(tokens, (b"a", b"a"))
    assert b"".join(found) == b"".join(tokens), (
        f"{found} has other bytes than the word: after a pair go on behind both, else behind one"
    )
    assert found != [b"aa", b"a", b"b", b"a", b"a"], "the last two tokens are a pair, too"
    assert found != [b"a", b"aa", b"b", b"aa"], "a, a, a is aa, a: from left to right"
    assert b"aaa" not in found, "a merged token is not merged again with the same pair"
    assert found == [b"aa", b"a", b"b", b"aa"]
    assert code.merge_pair([b"b", b"a"], (b"a", b"b")) == [b"b", b"a"], "a pair has an order"
    assert code.merge_pair([b"a", b"b"], (b"a", b"b")) == [b"ab"], "the last two are a pair, too"


def test_train_bpe_joins_the_most_frequent_pair(code: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("hug hug hug hug hug pug pug pun", encoding="utf-8")
    vocab, merges = code.train_bpe(path, 260, ["<|end|>"])
    # "ug" 7 times; then "h" with "ug" 5 times, once at the start; then " " with "hug" 4 times
    right = [(b"u", b"g"), (b"h", b"ug"), (b" ", b"hug")]
    assert len(merges) == 3, (
        f"{len(merges)} merges: 260 tokens are 1 special token, 256 bytes and 3 merges"
    )
    assert (b"g", b" ") not in merges, (
        "a space begins a word (PATTERN); no pair goes over a word's end"
    )
    assert merges[0] == right[0], f"u, g occurs most often, 7 times; this begins with {merges[0]}"
    assert merges[1] != (b"u", b"n"), "counts are of the pairs after the merges so far: count again"
    assert merges == right
    assert vocab[0] == b"<|end|>", "special tokens get the first ids"
    assert sorted(vocab) == list(range(260))
    assert set(vocab.values()) == {
        *(bytes([byte]) for byte in range(256)),
        *(b"<|end|>", b"ug", b"hug", b" hug"),
    }


def test_train_bpe_takes_the_greatest_of_equals(code: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abc zyx", encoding="utf-8")
    _, merges = code.train_bpe(path, 300, [])
    first, second = [(b"z", b"y"), (b"zy", b"x")], [(b"b", b"c"), (b"a", b"bc")]
    assert merges[0] == first[0], (
        f"all pairs occur once, and this begins with {merges[0]}: of equals it is the greatest, as"
        " Python compares tuples of bytes"
    )
    assert merges == [*first, *second, (b" ", b"zyx")]


def test_train_bpe_matches_counting_again(code: ModuleType, text_file: Path) -> None:
    vocab, merges = trained(code, text_file)
    text = text_file.read_bytes().decode()
    right = naive_bpe(text, 400, SPECIAL)
    at = next((n for n, (a, b) in enumerate(zip(merges, right, strict=False)) if a != b), None)
    assert at is None, (
        f"merge {at} is {merges[at]} instead of {right[at]}, after {right[:at][-3:]}. Are the"
        " counts of"
        " all pairs beside a merge brought up to date, also in a word that has it twice, and the"
        " line"
        " ends of the file left as they are (newline='')?"
    )
    assert len(merges) == len(right)
    assert list(vocab.values())[-len(merges) :] == [first + second for first, second in merges]


def test_train_bpe_stops_when_nothing_is_left(code: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abab<|end|>b", encoding="utf-8")
    vocab, merges = code.train_bpe(path, 1000, ["<|end|>"])
    assert merges == [(b"a", b"b"), (b"ab", b"ab")], "abab has two merges, and then nothing is left"
    assert len(vocab) == 259


def test_train_bpe_learns_nothing_from_special_tokens(code: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a<|end|><|user|>b<|end|>" * 100 + " cd", encoding="utf-8")
    _, merges = code.train_bpe(path, 1000, SPECIAL)
    assert (b"<", b"|") not in merges, "special tokens are taken out before words are counted"
    assert merges == [(b"c", b"d"), (b" ", b"cd")], (
        "words end at a special token: what is before it and after it is never one word"
    )


def test_encode_matches_tiktoken(code: ModuleType, text_file: Path) -> None:
    vocab, merges = trained(code, text_file)
    special = SPECIAL[:2]
    ids = {token: number for number, token in vocab.items()}
    numbers = {name: ids[name.encode()] for name in special}
    ranks = {token: n for token, n in ids.items() if token.decode(errors="replace") not in SPECIAL}
    reference = tiktoken.Encoding(
        "reference", pat_str=GPT2, mergeable_ranks=ranks, special_tokens=numbers
    )
    tokenizer = code.Tokenizer(vocab, merges, special)
    for text in (TEXT, "low lowest slow   \n", "", " ", "s", "🙃", "x" * 300):
        expected = reference.encode(text, allowed_special="all")
        assert tokenizer.decode(expected) == text, (
            "decode joins the bytes of all tokens, then decodes"
        )
        found = tokenizer.encode(text)
        assert tokenizer.decode(found) == text, "the tokens are not those of the text"
        assert len(found) >= len(expected), "a token goes over the end of a word of PATTERN"
        assert found == expected, (
            "tokens are others, though of the same text: in a word, join the pair that was learned"
            " first (the first in merges) wherever it is, again and again; the longest token that"
            " fits"
            " is another rule"
        )


def test_encode_prefers_the_longest_special_token(code: ModuleType, text_file: Path) -> None:
    vocab, merges = trained(code, text_file)
    tokenizer = code.Tokenizer(vocab, merges, SPECIAL)
    found = [tokenizer.decode([number]) for number in tokenizer.encode("a<|end|><|end|><|end|>")]
    assert found == ["a", "<|end|><|end|>", "<|end|>"], (
        f"{found}: where several special tokens begin, the longest one is taken; sort them by"
        " length"
        " in the pattern, and escape |"
    )


def test_encode_without_special_tokens_takes_them_as_text(
    code: ModuleType, text_file: Path
) -> None:
    vocab, merges = trained(code, text_file)
    tokenizer = code.Tokenizer(vocab, merges)
    ids = tokenizer.encode("<|end|>")
    assert len(ids) > 1, "a tokenizer without special tokens takes their names as text"
    assert tokenizer.decode(ids) == "<|end|>"


def test_encode_gives_new_special_tokens_the_next_ids(code: ModuleType, text_file: Path) -> None:
    vocab, merges = trained(code, text_file)
    tokenizer = code.Tokenizer(vocab, merges, [*SPECIAL, "<|new|>"])
    assert b"<|new|>" not in vocab.values(), "the vocabulary that was given is changed: copy it"
    assert tokenizer.encode("<|new|>") == [len(vocab)], "a new special token gets the next id"


def test_decode_replaces_half_a_character(code: ModuleType, text_file: Path) -> None:
    vocab, merges = trained(code, text_file, 259)
    tokenizer = code.Tokenizer(vocab, merges)
    with explained({"UnicodeDecodeError": 'half a character is U+FFFD: decode(errors="replace")'}):
        assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


@pytest.mark.parametrize("special", [[], SPECIAL], ids=["plain", "special"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_encode_iterable_is_encode_however_a_text_is_cut(
    code: ModuleType, text_file: Path, size: int, special: list[str]
) -> None:
    vocab, merges = trained(code, text_file)
    tokenizer = code.Tokenizer(vocab, merges, special)
    parts = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    found = list(tokenizer.encode_iterable(parts))
    assert tokenizer.decode(found) == TEXT, "some of the text is lost, or is there twice"
    assert found == tokenizer.encode(TEXT), (
        f"in parts of {size} characters the tokens are others: a word or a special token may go on"
        " in"
        " the next part, so keep what may still change"
    )


def test_encode_iterable_keeps_little_in_memory(code: ModuleType, text_file: Path) -> None:
    vocab, merges = trained(code, text_file)
    tokenizer = code.Tokenizer(vocab, merges, SPECIAL)

    def lines() -> Iterator[str]:
        for number in range(4000):
            yield f"{number} low lower, lowest; the sea shells that she sells by the shore<|end|>\n"

    list(itertools.islice(tokenizer.encode_iterable(lines()), 2000))
    tracemalloc.start()
    count = sum(1 for _ in tokenizer.encode_iterable(lines()))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count > 40_000
    assert peak < 4_000_000, (  # the ids of a word may be kept to look them up
        f"{peak / 1e6:.1f} MB for a text that comes in lines: yield tokens as soon as they are"
        " settled"
    )
    assert next(iter(tokenizer.encode_iterable(itertools.cycle(["sea shells "]))))


def test_save_writes_files_that_others_read(
    code: ModuleType, text_file: Path, tmp_path: Path
) -> None:
    vocab, merges = trained(code, text_file)
    tokenizer = code.Tokenizer(vocab, merges, [*SPECIAL[:2], "<|endoftext|>"])
    tokenizer.save(tmp_path / "tokenizer")
    other = load_tokenizer(tmp_path / "tokenizer")
    text = TEXT + "<|endoftext|>"
    assert other.encode(text) == tokenizer.encode(text)
    assert other.decode(tokenizer.encode(text)) == text
    names = json.loads((tmp_path / "tokenizer/added_tokens.json").read_text(encoding="utf-8"))
    assert names == {"<|end|>": 0, "<|user|>": 1, "<|endoftext|>": len(vocab)}

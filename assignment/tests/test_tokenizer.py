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
    assert code.merge_pair(tokens, (b"a", b"a")) == [b"aa", b"a", b"b", b"aa"]
    assert code.merge_pair([b"b", b"a"], (b"a", b"b")) == [b"b", b"a"]
    assert code.merge_pair([b"a", b"b"], (b"a", b"b")) == [b"ab"]


def test_train_bpe_joins_the_most_frequent_pair(code: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("hug hug hug hug hug pug pug pun", encoding="utf-8")
    vocab, merges = code.train_bpe(path, 260, ["<|end|>"])
    # "ug" 7 times; then "h" with "ug" 5 times, once at the start; then " " with "hug" 4 times
    assert merges == [(b"u", b"g"), (b"h", b"ug"), (b" ", b"hug")]
    assert vocab[0] == b"<|end|>"
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
    assert merges == [*first, *second, (b" ", b"zyx")]


def test_train_bpe_matches_counting_again(code: ModuleType, text_file: Path) -> None:
    vocab, merges = trained(code, text_file)
    text = text_file.read_bytes().decode()
    assert merges == naive_bpe(text, 400, SPECIAL)
    assert list(vocab.values())[-len(merges) :] == [first + second for first, second in merges]


def test_train_bpe_stops_when_nothing_is_left(code: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abab<|end|>b", encoding="utf-8")
    vocab, merges = code.train_bpe(path, 1000, ["<|end|>"])
    assert merges == [(b"a", b"b"), (b"ab", b"ab")]
    assert len(vocab) == 259


def test_train_bpe_learns_nothing_from_special_tokens(code: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("a<|end|><|user|>b<|end|>" * 100 + " cd", encoding="utf-8")
    _, merges = code.train_bpe(path, 1000, SPECIAL)
    assert merges == [(b"c", b"d"), (b" ", b"cd")]


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
        assert tokenizer.encode(text) == expected
        assert tokenizer.decode(expected) == text


def test_encode_prefers_the_longest_special_token(code: ModuleType, text_file: Path) -> None:
    vocab, merges = trained(code, text_file)
    tokenizer = code.Tokenizer(vocab, merges, SPECIAL)
    found = [tokenizer.decode([number]) for number in tokenizer.encode("a<|end|><|end|><|end|>")]
    assert found == ["a", "<|end|><|end|>", "<|end|>"]


def test_encode_without_special_tokens_takes_them_as_text(
    code: ModuleType, text_file: Path
) -> None:
    vocab, merges = trained(code, text_file)
    tokenizer = code.Tokenizer(vocab, merges)
    ids = tokenizer.encode("<|end|>")
    assert len(ids) > 1
    assert tokenizer.decode(ids) == "<|end|>"


def test_encode_gives_new_special_tokens_the_next_ids(code: ModuleType, text_file: Path) -> None:
    vocab, merges = trained(code, text_file)
    tokenizer = code.Tokenizer(vocab, merges, [*SPECIAL, "<|new|>"])
    assert tokenizer.encode("<|new|>") == [len(vocab)]
    assert b"<|new|>" not in vocab.values()


def test_decode_replaces_half_a_character(code: ModuleType, text_file: Path) -> None:
    vocab, merges = trained(code, text_file, 259)
    tokenizer = code.Tokenizer(vocab, merges)
    assert tokenizer.decode(tokenizer.encode("é")[:1]) == "\ufffd"


@pytest.mark.parametrize("special", [[], SPECIAL], ids=["plain", "special"])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_encode_iterable_is_encode_however_a_text_is_cut(
    code: ModuleType, text_file: Path, size: int, special: list[str]
) -> None:
    vocab, merges = trained(code, text_file)
    tokenizer = code.Tokenizer(vocab, merges, special)
    parts = [TEXT[at : at + size] for at in range(0, len(TEXT), size)]
    assert list(tokenizer.encode_iterable(parts)) == tokenizer.encode(TEXT)


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
    assert peak < 4_000_000  # the ids of a word may be kept to look them up
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

"""Byte-level BPE: learn merges from text, then encode and decode with them (Sennrich et al. 2016,
https://arxiv.org/abs/1508.07909). Task: `assignment/tasks/tokenizer.md`.

Text is cut into pieces, the words of `PATTERN` and the special tokens. A token never reaches over
the end of a piece.
"""

import functools
import heapq
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import regex

PATTERN = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""How GPT-2 splits text into words (Radford et al. 2019): endings such as 's; letters, digits or
other signs, each with a space before them if there is one; and the white space that is left."""
CHARACTERS_AT_ONCE = 1 << 16
Pair = tuple[bytes, bytes]


def split_text(texts: Iterable[str], special_tokens: Sequence[str]) -> Iterator[str]:
    """Yield the pieces of a text, which together are the text.

    A text may be cut into `texts` anywhere, also inside a word or a special token; the pieces are
    those of the whole. Only the end of the text so far is kept: up to the longest special token,
    two more pieces, and the next of `texts`.

    Args:
        texts: parts of one text.
        special_tokens: each occurrence is a piece of its own; where several begin, the longest one
            is.
    """
    longest = max(map(len, special_tokens), default=0)
    rest = ""
    for text in texts:
        rest += text
        pieces = list(_pieces(rest, special_tokens))
        # More text can change a special token only if there may be a longer one in its place, and
        # a word only if it is one of the last two: "'l" is two words, and "'ll" one.
        settled = [piece for piece, end in pieces if end <= len(rest) - longest][:-2]
        yield from settled
        rest = rest[sum(map(len, settled)) :]
    yield from (piece for piece, _ in _pieces(rest, special_tokens))


def _pieces(text: str, special_tokens: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the pieces of a whole text, each with the position where it ends."""
    begin = 0
    for special in _special_pattern(tuple(special_tokens)).finditer(text):
        yield from _words(text, begin, special.start())
        yield special[0], special.end()
        begin = special.end()
    yield from _words(text, begin, len(text))


def _words(text: str, begin: int, end: int) -> Iterator[tuple[str, int]]:
    for word in PATTERN.finditer(text[begin:end]):
        yield word[0], begin + word.end()


@functools.cache
def _special_pattern(special_tokens: tuple[str, ...]) -> regex.Pattern[str]:
    longest_first = sorted(special_tokens, key=len, reverse=True)
    nothing = "(?!)"
    return regex.compile("|".join(map(regex.escape, longest_first)) or nothing)


def train_bpe(
    input_path: Path | str, vocab_size: int, special_tokens: Sequence[str]
) -> tuple[dict[int, bytes], list[Pair]]:
    """Learn a vocabulary from a file of UTF-8 text.

    Each merge joins the pair of neighbouring tokens that occurs most often; of several, the
    greatest, as Python compares tuples of bytes. Special tokens are not learned from.

    Args:
        input_path: the text, of which only a part is in memory at a time.
        vocab_size: tokens to end with: special tokens, 256 bytes, and merges; fewer if no pair is
            left to merge.
        special_tokens: such as "<|endoftext|>"; they get the first ids.

    Returns:
        vocab: bytes of each token, by id.
        merges: the pairs that were merged, in this order.
    """
    counts = count_words(input_path, special_tokens)
    vocab = [token.encode() for token in special_tokens] + [bytes([byte]) for byte in range(256)]
    merges: list[Pair] = []
    pairs = PairCounts(counts)
    while len(vocab) < vocab_size and (best := pairs.most_frequent()):
        merges.append(best)
        vocab.append(best[0] + best[1])
        pairs.merge(best)
    return dict(enumerate(vocab)), merges


def count_words(input_path: Path | str, special_tokens: Sequence[str]) -> Counter[bytes]:
    """Return how often each word occurs in a file, without the special tokens."""
    with Path(input_path).open(encoding="utf-8", newline="") as file:
        parts = iter(lambda: file.read(CHARACTERS_AT_ONCE), "")
        counts = Counter(split_text(parts, special_tokens))
    return Counter({w.encode(): n for w, n in counts.items() if w not in special_tokens})


class PairCounts:
    """How often each pair of neighbouring tokens occurs, kept up to date merge by merge."""

    def __init__(self, word_counts: Counter[bytes]) -> None:
        self._words = [[bytes([byte]) for byte in word] for word in word_counts]
        self._word_counts = list(word_counts.values())
        self._counts: defaultdict[Pair, int] = defaultdict(int)
        self._places: defaultdict[Pair, set[int]] = defaultdict(set)
        """Numbers of the words that have a pair, or had it once."""
        for number in range(len(self._words)):
            self._add(number)
        self._candidates = [_candidate(pair, count) for pair, count in self._counts.items()]
        heapq.heapify(self._candidates)

    def most_frequent(self) -> Pair | None:
        """Return the pair to merge next, or None if there is none. Candidates whose count has
        changed since are dropped: there is another of the same pair."""
        while self._candidates:
            negative_count, greatest = heapq.heappop(self._candidates)
            if self._counts[greatest.pair] == -negative_count:
                return greatest.pair
        return None

    def merge(self, pair: Pair) -> None:
        """Join a pair in every word that has it, and count again the pairs of these words."""
        changed: set[Pair] = set()
        for number in self._places.pop(pair):
            old, new = self._words[number], merge_pair(self._words[number], pair)
            if len(new) < len(old):
                changed.update(pairwise(old), pairwise(new))
                self._take_away(number)
                self._words[number] = new
                self._add(number)
        for each in changed:
            if count := self._counts[each]:
                heapq.heappush(self._candidates, _candidate(each, count))

    def _add(self, number: int) -> None:
        """Count the pairs of a word."""
        for pair in pairwise(self._words[number]):
            self._counts[pair] += self._word_counts[number]
            self._places[pair].add(number)

    def _take_away(self, number: int) -> None:
        """Undo `_add`, but for the places."""
        for pair in pairwise(self._words[number]):
            self._counts[pair] -= self._word_counts[number]


class _Greatest:
    """A pair that sorts before smaller ones."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __lt__(self, other: "_Greatest") -> bool:
        return self.pair > other.pair


def _candidate(pair: Pair, count: int) -> tuple[int, _Greatest]:
    """Return what sorts by count, the largest first, then by pair, the greatest first."""
    return -count, _Greatest(pair)


def merge_pair(tokens: list[bytes], pair: Pair) -> list[bytes]:
    """Return a word with each occurrence of a pair joined, from left to right."""
    first, second = pair
    merged: list[bytes] = []
    last = len(tokens) - 1
    at = 0
    while at <= last:
        is_pair = tokens[at] == first and at < last and tokens[at + 1] == second
        merged.append(first + second if is_pair else tokens[at])
        at += 2 if is_pair else 1
    return merged


class Tokenizer:
    """Encodes text with a vocabulary and merges, and decodes it."""

    def __init__(
        self,
        vocab: dict[int, bytes],
        merges: list[Pair],
        special_tokens: Sequence[str] | None = None,
    ) -> None:
        """Take what `train_bpe` returns. Special tokens that the vocabulary lacks get the next
        ids."""
        self.special_tokens = list(special_tokens or [])
        self.vocab, self.merges = dict(vocab), list(merges)
        for token in self.special_tokens:
            if token.encode() not in self.vocab.values():
                self.vocab[max(self.vocab) + 1] = token.encode()
        self._ids = {token: number for number, token in self.vocab.items()}
        self._ranks = {pair: rank for rank, pair in enumerate(merges)}
        self._encode_word = functools.lru_cache(maxsize=1 << 14)(self._encode_new_word)

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. The name of a special token becomes that token."""
        return list(self.encode_iterable([text]))

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[int]:
        """Yield the token ids of a text that comes in parts, such as the lines of an open file:
        those of `encode` for the whole text, with only a part of it in memory at a time."""
        special = set(self.special_tokens)
        for piece in split_text(texts, self.special_tokens):
            if piece in special:
                yield self._ids[piece.encode()]
            else:
                yield from self._encode_word(piece)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD, as ids may stop
        inside a character."""
        return b"".join(self.vocab[number] for number in ids).decode(errors="replace")

    def save(self, folder: Path | str) -> None:
        """Write `vocab.json`, `merges.txt` and `added_tokens.json` into a folder, in the format of
        GPT-2, in which every byte is a printable character."""
        names = {number: _printable(token) for number, token in self.vocab.items()}
        vocab = {name: number for number, name in names.items()}
        lines = [f"{_printable(first)} {_printable(second)}" for first, second in self.merges]
        special = {token: self._ids[token.encode()] for token in self.special_tokens}
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        folder.joinpath("vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
        text = "\n".join(["#version: 0.2", *lines, ""])
        folder.joinpath("merges.txt").write_text(text, encoding="utf-8")
        folder.joinpath("added_tokens.json").write_text(json.dumps(special), encoding="utf-8")

    def _encode_new_word(self, word: str) -> tuple[int, ...]:
        """Return the ids of a word: of all pairs that can be merged, join the one that was learned
        first, until none is left."""
        tokens = [bytes([byte]) for byte in word.encode()]
        while True:
            pairs = [pair for pair in pairwise(tokens) if pair in self._ranks]
            if not pairs:
                return tuple(self._ids[token] for token in tokens)
            tokens = merge_pair(tokens, min(pairs, key=self._ranks.__getitem__))


@functools.cache
def _byte_names() -> list[str]:
    """Return a printable character for every byte: its own in Latin-1 if it is printable and not
    white space, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(0x100 + number) for number, byte in enumerate(others)}
    return [names[byte] for byte in range(256)]


def _printable(token: bytes) -> str:
    return "".join(_byte_names()[byte] for byte in token)

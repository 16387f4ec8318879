"""Tokenizers behind one small interface: trained here, from a file, or from the hub."""

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

import hub
from errors import UserError

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")
"""What tokenizers call it: GPT-2, Llama 3, Llama and Mistral, Gemma."""
SMALLEST_VOCAB = 257
"""The 256 bytes and the end of text."""
_CHUNK_CHARACTERS = 1 << 18
_CHUNKS_AT_ONCE = 8
_CONTEXT_CHARACTERS = 200
_MOST_CUTS_TRIED = 100


class Tokenizer:
    """Text to token ids and back."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """Smallest vocab_size a model can have: the largest id, plus one."""
        ends = (vocabulary[token] for token in _ENDS_OF_TEXT if token in vocabulary)
        self.end_of_text: int | None = next(ends, None)
        """Id of the token that separates documents, where there is one."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added. The name of a special token becomes that token.

        Raises:
            UserError: for text that is not valid Unicode.
        """
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, for several texts, on all cores."""
        try:
            encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            raise UserError("the text holds half a character (a lone surrogate)") from None
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of token ids. Ids beyond the vocabulary stand for nothing; bytes that are not
        whole characters become U+FFFD."""
        numbers = [int(number) for number in ids]
        text: str = self._tokenizer.decode(numbers, skip_special_tokens=skip_special_tokens)
        return text

    def byte_count(self, ids: Sequence[int] | np.ndarray) -> int:
        """Bytes of UTF-8 text that the ids stand for; special tokens count none.

        Exact for byte-level tokenizers, also where ids split a character; for others the length
        of the decoded text.
        """
        if self._bytes_per_token is None:
            return len(self.decode(ids, skip_special_tokens=True).encode())
        known = np.asarray(ids, np.int64)
        return int(self._bytes_per_token[known[known < self.vocab_size]].sum())

    @functools.cached_property
    def _bytes_per_token(self) -> np.ndarray | None:
        """For each id of a byte-level tokenizer, how many bytes it stands for."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        counts = np.zeros(self.vocab_size, np.int64)
        for token, number in self._tokenizer.get_vocab(with_added_tokens=True).items():
            counts[number] = len(token)  # byte-level tokens spell each byte as one character
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            counts[number] = 0 if added.special else len(added.content.encode())
        return counts

    def save(self, path: Path) -> None:
        """Write the tokenizer as `tokenizer.json`."""
        self._tokenizer.save(str(path))

    def encode_stream(
        self, pieces: Iterable[str], chunk_characters: int = _CHUNK_CHARACTERS
    ) -> Iterator[list[int]]:
        """Token ids of a text that comes in pieces, in bounded memory.

        The text is cut at a line end, else a space, where the cut changes no id as far as 200
        characters around it can tell. Where there is no such place, as with tokenizers that mark
        the start of every text, it is cut at a line end all the same, and the ids around it may
        differ from those of the whole text.
        """
        chunks = self._chunks(pieces, chunk_characters)
        while batch := [chunk for _, chunk in zip(range(_CHUNKS_AT_ONCE), chunks, strict=False)]:
            yield from self.encode_batch(batch)

    def _chunks(self, pieces: Iterable[str], size: int) -> Iterator[str]:
        buffer = ""
        for piece in pieces:
            buffer += piece
            while len(buffer) >= size + _CONTEXT_CHARACTERS:
                cut = self._cut(buffer, size)
                yield buffer[:cut]
                buffer = buffer[cut:]
        yield buffer

    def _cut(self, text: str, size: int) -> int:
        """Where to cut a text, at most `size` characters from its start."""
        line_ends = [place + 1 for place in _rfind_all(text, "\n", size - 1)]
        before_spaces = [place for place in _rfind_all(text, " ", size) if place]
        places = [*line_ends, *before_spaces, size]
        return next((place for place in places if self._harmless(text, place)), places[0])

    def _harmless(self, text: str, cut: int) -> bool:
        left = text[max(cut - _CONTEXT_CHARACTERS, 0) : cut]
        right = text[cut : cut + _CONTEXT_CHARACTERS]
        whole, first, second = self.encode_batch([left + right, left, right])
        return whole == first + second


def _rfind_all(text: str, separator: str, end: int) -> Iterator[int]:
    """Places of a separator before `end`, the last first, up to a limit."""
    for _ in range(_MOST_CUTS_TRIED):
        end = text.rfind(separator, 0, end)
        if end < 0:
            return
        yield end


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer (Sennrich et al. 2016; bytes as in GPT-2): the 256 bytes,
    the end of text, and merges up to `vocab_size`, fewer where the texts have no more pairs."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer)


def load_tokenizer(place: Path | str) -> Tokenizer:
    """Load a tokenizer from a folder with a `tokenizer.json`, from such a file, or, for a string
    that names neither, from the model of that id on the hub (or the hub's local cache).

    Raises:
        UserError: where there is none, it is damaged, or the hub cannot be reached.
    """
    path = Path(place)
    if (path / TOKENIZER_FILE).is_file():
        path = path / TOKENIZER_FILE
    elif isinstance(place, str) and not path.is_file() and _may_be_hub_id(place):
        path = hub.model_file(place, TOKENIZER_FILE)
    return _read(path)


def _may_be_hub_id(place: str) -> bool:
    return place.count("/") <= 1 and not place.startswith((".", "/")) and ".json" not in place


def _read(path: Path) -> Tokenizer:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such tokenizer file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable tokenizer file: {error}") from None
    loaded: Any
    try:
        loaded = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower type
        raise UserError(f"{path}: not a tokenizer file: {error}") from None
    return Tokenizer(loaded)

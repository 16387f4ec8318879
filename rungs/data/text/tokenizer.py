"""Encode text to token ids and decode ids to text, with one interface for all tokenizers; train a
byte-level BPE tokenizer (Sennrich et al. 2016; bytes and text splitting as in GPT-2)."""

import bisect
import contextlib
import functools
import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rungs.common.errors import UserError, check_characters, reason
from rungs.common.strict_json import format_value

TOKENIZER_FILE = "tokenizer.json"
END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_NAMES = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>")
"""Names of the end-of-text token in published tokenizers: GPT-2 and Qwen, Llama 3, Gemma (where
</s> is an HTML tag), Llama and Mistral."""
LARGEST_VOCAB = 1 << 24
"""Many times the vocabulary of any published model."""
REPLACEMENT_CHARACTER = "\ufffd"
"""The decoding of incomplete UTF-8."""
_BYTE_TOKEN = "<0x"
_BYTE_NAME = re.compile(rf"{_BYTE_TOKEN}[0-9A-Fa-f]{{2}}>")
SMALLEST_VOCAB = 257
"""Of a trained BPE tokenizer: the 256 bytes and the end-of-text token."""
_LONGEST_PIECE = 1024
"""Characters. A merge's time grows with the square of it: a million dashes took minutes."""
_CHUNK_CHARACTERS = 1 << 18
_CHUNKS_PER_BATCH = 8
_CONTEXT_CHARACTERS = 200
_MAX_CUTS_TRIED = 100
_NO_PREFIX: dict[str, dict[str, object]] = {
    "ByteLevel": {"add_prefix_space": False},
    "Metaspace": {"prepend_scheme": "never"},
    "Prepend": {"prepend": ""},
}
"""Settings with which each part of a tokenizer adds no space before texts."""


class TextEnds(NamedTuple):
    """The tokens that end texts, each None if there is none."""

    text: int | None
    """Id of the token that separates documents."""
    answer: int | None
    """Id of the token that ends an answer; differs from `text` in models trained to chat."""
    source: str
    """File or vocabulary that names them, for messages."""


class Tokenizer:
    """Encodes text to token ids and decodes ids to text. Without `ends`, texts end with the first
    known name in the vocabulary, else with what the tokenizer's template puts after a text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, ends: TextEnds | None = None) -> None:
        self._tokenizer = tokenizer
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if isinstance(tokenizer.model, models.BPE):
            tokenizer.model.dropout = None  # of merges at random: each call would give other ids
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        """Largest token id plus one: the smallest `vocab_size` a model can have."""
        self.begin, self.template_end = _template(tokenizer)
        """Ids that the template puts before and after a text: a begin-of-text token before it with
        Llama, Gemma and Mistral; none with GPT-2 and tokenizers trained here."""
        name = name_in(vocabulary)
        end = vocabulary[name] if name else next(reversed(self.template_end), None)
        self._usual_ends = TextEnds(end, end, "its name" if name else "the tokenizer's template")
        self.ends = ends or self._usual_ends

    @property
    def end_of_text(self) -> int | None:
        """Id of the token that separates documents, or None if there is none."""
        return self.ends.text

    @property
    def end_of_answer(self) -> int | None:
        """Id of the token that ends an answer, or None if there is none."""
        return self.ends.answer

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a piece of text, without adding special tokens, though a special
        token's name in the text becomes that token. For prompts use `encode_prompt`. Raises
        UserError if the text is not valid Unicode, or the tokenizer has no tokens for it."""
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str) -> list[int]:
        """Return a prompt's ids: `begin`, then those of `encode`, without the template's end."""
        return [*self.begin, *self.encode(text)]

    def encode_beginning(self, text: str) -> list[int]:
        """Like `encode_prompt`, but return the end-of-text token, after which texts begin, for an
        empty prompt. Raises UserError if there is no token to start with."""
        if tokens := self.encode_prompt(text):
            return tokens
        if self.end_of_text is None:
            raise UserError(
                "the prompt is empty, and the tokenizer has no end-of-text token to start with"
            )
        return [self.end_of_text]

    def encode_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the result of `encode`, and for each span of characters its span of tokens, from
        the token with its first character to that with its last; without any, an empty one before
        the next token."""
        [encoding] = self._encodings(self._tokenizer.encode_batch, [text])
        starts = [start for start, _ in encoding.offsets]

        def span_of_tokens(start: int, end: int) -> tuple[int, int]:
            tokens = map(encoding.char_to_token, range(start, end))
            first = next((token for token in tokens if token is not None), None)
            if first is None:
                return (bisect.bisect_left(starts, start),) * 2
            return first, bisect.bisect_left(starts, end, first)

        return encoding.ids, [span_of_tokens(*span) for span in spans]

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of tokens that are not text, such as the end of a turn."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @functools.cached_property
    def special_names(self) -> dict[int, str]:
        """Names of these tokens, by id."""
        return {number: str(self._tokenizer.id_to_token(number)) for number in self.special_ids}

    @functools.cached_property
    def _added_ids(self) -> frozenset[int]:
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Like `encode` for several texts in parallel, on all cores."""
        return [each.ids for each in self._encodings(self._tokenizer.encode_batch_fast, texts)]

    def _encodings(self, encode: Callable[..., list[Any]], texts: Sequence[str]) -> list[Any]:
        try:
            with library_errors("the text cannot be tokenized"):
                return encode(list(texts), add_special_tokens=False)
        except UserError:
            characters = "".join(dict.fromkeys("".join(texts)))
            check_characters(characters, "the text")
            unknown = [format_value(one) for one in characters if not self._knows(one)]
            if unknown:
                raise UserError(f"the tokenizer has no tokens for {' '.join(unknown)}") from None
            raise

    def _knows(self, character: str) -> bool:
        """Return whether there are tokens for a character."""
        with contextlib.suppress(UserError), library_errors(""):
            self._tokenizer.encode(character)
            return True
        return False

    @functools.cached_property
    def continuing(self) -> "Tokenizer":
        """The tokenizer for texts that continue another, such as answers: without the space that
        SentencePiece and others add before a text (the oldest also after special tokens)."""
        definition = json.loads(
            self._tokenizer.to_str(),
            object_hook=lambda part: part | _NO_PREFIX.get(part.get("type", ""), {}),
        )
        with library_errors("the tokenizer's definition is not valid"):
            return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(definition)), self.ends)

    @functools.cached_property
    def literal(self) -> "Tokenizer":
        """Like `continuing`, for texts of others: names of special tokens in them are text."""
        tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(self.continuing.as_json()), self.ends)
        tokenizer._tokenizer.encode_special_tokens = True
        return tokenizer

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Return the text of token ids. Ids beyond the vocabulary are ignored; bytes that form no
        character become U+FFFD."""
        numbers = [int(number) for number in ids]
        return self.decode_batch([numbers], skip_special_tokens=skip_special_tokens)[0]

    def decode_batch(
        self, batch: Sequence[Sequence[int]], *, skip_special_tokens: bool = False
    ) -> list[str]:
        """Like `decode` for several texts in parallel, on all cores."""
        with library_errors("the tokens have no text"):
            return self._tokenizer.decode_batch(batch, skip_special_tokens=skip_special_tokens)

    def decode_settled(self, ids: Sequence[int]) -> str:
        """Return the part of the text, without special tokens, that further ids cannot change, with
        the decoders of known models."""
        text = self.decode(ids[: self._before_open_bytes(ids)], skip_special_tokens=True)
        return text.rstrip(REPLACEMENT_CHARACTER)

    @functools.cached_property
    def _decoder(self) -> dict[str, Any] | None:
        """The decoder in the format of `tokenizer.json`."""
        return json.loads(self._tokenizer.to_str()).get("decoder")

    def _before_open_bytes(self, ids: Sequence[int]) -> int:
        """Return the number of ids before the byte tokens at the end: if such a run is not valid
        UTF-8, each byte becomes U+FFFD. Special tokens don't end a run."""
        end = len(ids)
        for place in range(len(ids) - 1, -1, -1):
            name = self._tokenizer.id_to_token(int(ids[place]))
            if name is not None and _BYTE_TOKEN in name:
                end = place
            elif name is not None and int(ids[place]) not in self.special_ids:
                break
        return end

    def byte_count(self, ids: Sequence[int] | np.ndarray) -> int:
        """Return the number of UTF-8 bytes that the ids represent, with 0 for special tokens. It is
        exact for byte-level tokenizers even if ids start or end inside a character; for others it
        is the length of the decoded text."""
        if self._byte_counts is None:
            return len(self.decode(ids, skip_special_tokens=True).encode())
        numbers, counts = np.unique(np.asarray(ids, np.int64), return_counts=True)
        pairs = zip(numbers.tolist(), counts.tolist(), strict=True)
        return sum(count * self._byte_counts.get(number, 0) for number, count in pairs)

    def bytes_of(self, number: int) -> bytes:
        """Return what a token adds to a text that has begun, in UTF-8, or a part of a character;
        nothing for special tokens and ids beyond the vocabulary."""
        name = self._tokenizer.id_to_token(number)
        if name is None or number in self.special_ids:
            return b""
        if number not in self._added_ids:
            if self._byte_counts is not None:
                return _spelled_bytes(name)
            if self.is_byte(number):
                return bytes.fromhex(name.removeprefix(_BYTE_TOKEN)[:2])
        once, twice = self.decode_batch([[number], [number, number]])
        return twice[len(once) :].encode()

    def is_byte(self, number: int) -> bool:
        """Return whether a token stands for one byte, as `<0xE2>` in SentencePiece."""
        name = self._tokenizer.id_to_token(number) or ""
        return self._falls_back and bool(_BYTE_NAME.fullmatch(name))

    @functools.cached_property
    def _falls_back(self) -> bool:
        return "ByteFallback" in json.dumps(self._decoder)

    @functools.cached_property
    def _byte_counts(self) -> dict[int, int] | None:
        """Number of bytes per id, or None if the tokenizer is not byte-level."""
        if (self._decoder or {}).get("type") != "ByteLevel":
            return None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        counts = {number: len(_spelled_bytes(token)) for token, number in vocabulary.items()}
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            counts[number] = 0 if added.special else len(added.content.encode())
        return counts

    def describe_texts(self, begin: Sequence[int]) -> str:
        """Describe to people the tokens that begin (`begin`) and end texts, and their source."""
        start = f"begin with {self.names(begin)} and " if begin else ""
        end = self.names([self.end_of_text])
        if self.end_of_answer != self.end_of_text:
            end += f", answers with {self.names([self.end_of_answer])}"
        return f"texts {start}end with {end}, by {self.ends.source}"

    def names(self, ids: Sequence[int | None]) -> str:
        """Return the names and ids of special tokens, for people to read."""
        known = dict.fromkeys(number for number in ids if number is not None)
        found = (
            f"{self._tokenizer.id_to_token(i) or 'beyond the vocabulary'} ({i})" for i in known
        )
        return " ".join(found) or "no special token"

    @functools.cached_property
    def definition(self) -> str:
        """Definition without its template; with equal ones, tokenizers `encode` to equal ids."""
        definition = json.loads(self._tokenizer.to_str())
        del definition["post_processor"]
        return json.dumps(definition)

    @property
    def eos_token(self) -> str | None:
        """Name of the token that ends an answer, if a file beside the vocabulary must give it."""
        if self.ends[:2] == self._usual_ends[:2] or self.end_of_answer is None:
            return None
        return self._tokenizer.id_to_token(self.end_of_answer)

    def as_json(self) -> str:
        """Return the content of `tokenizer.json`."""
        return self._tokenizer.to_str(pretty=True)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`; `save_tokenizer` adds the files beside it. Raises OSError."""
        path.write_text(self.as_json(), encoding="utf-8", newline="")

    def encode_stream(
        self, pieces: Iterable[str], chunk_characters: int = _CHUNK_CHARACTERS
    ) -> Iterator[list[int]]:
        """Yield the token ids of a text given in pieces, in bounded memory.

        The pieces are joined and cut into chunks at a line end, or else a space, where encoding the
        200 characters on each side separately and together gives the same ids. If there is no such
        place (for tokenizers that mark the start of every text), the cut is at a line end anyway,
        and ids around it may differ from those of the full text."""
        chunks = self._chunks(pieces, chunk_characters)
        while batch := list(itertools.islice(chunks, _CHUNKS_PER_BATCH)):
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
        """Return where to cut a text, at most `size` characters in."""

        def keeps_ids(cut: int) -> bool:
            left = text[max(cut - _CONTEXT_CHARACTERS, 0) : cut]
            right = text[cut : cut + _CONTEXT_CHARACTERS]
            uncut, first, second = self.encode_batch([left + right, left, right])
            return uncut == first + second

        def last(separator: str, end: int) -> list[int]:
            found = [match.start() for match in re.finditer(separator, text[:end])]
            return found[: -_MAX_CUTS_TRIED - 1 : -1]

        line_ends = [place + 1 for place in last("\n", size - 1)]
        before_spaces = [place for place in last(" ", size) if place]
        places = [*line_ends, *before_spaces, size]
        return next(filter(keeps_ids, places), places[0])


@contextlib.contextmanager
def library_errors(problem: str) -> Iterator[None]:
    """Turn the tokenizers library's errors in this context into a UserError with the reason."""
    try:
        yield
    except BaseException as error:  # the library has no narrower type, and Rust may panic
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{problem}: {reason(error)}") from None


def byte_characters() -> dict[str, int]:
    """Return the byte of each character in byte-level BPE: its own if printable, else, from U+0100
    on, those that are not."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {
        chr(number): byte for number, byte in enumerate(others, start=0x100)
    }


_BYTES = byte_characters()


def _spelled_bytes(token: str) -> bytes:
    """Return the bytes of a byte-level token; of one with other characters, its own."""
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        return token.encode()


def name_in(vocabulary: Mapping[str, int]) -> str | None:
    """Return the first known end-of-text name in a vocabulary."""
    return next((name for name in _END_OF_TEXT_NAMES if name in vocabulary), None)


def _template(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer's template puts before and after a text."""
    text = tokenizers.Tokenizer(models.WordLevel({"x": 0}, "x")).encode("x")
    with library_errors("the tokenizer's template can't be followed"):
        whole = tokenizer.post_process(text)
    place = [*whole.special_tokens_mask, 0].index(0)
    return whole.ids[:place], whole.ids[place + 1 :]


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a tokenizer with `vocab_size` tokens: the 256 bytes, end of text, and BPE merges; fewer
    if no pair occurs twice any more. The end-of-text token's name is removed from the texts, as
    encoding would turn it into that token. Raises UserError if `vocab_size` is too small."""
    if vocab_size < SMALLEST_VOCAB:
        raise UserError(f"a vocabulary of {vocab_size} is too small; use at least {SMALLEST_VOCAB}")
    tokenizer = byte_level_tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = (document for text in texts for document in text.split(END_OF_TEXT))
    splits = tokenizer.pre_tokenizer
    shortened = [splits, pre_tokenizers.FixedLength(_LONGEST_PIECE)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(shortened)
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.pre_tokenizer = splits
    return Tokenizer(tokenizer)


def byte_level_tokenizer(
    model: models.BPE, *, add_prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits text the way GPT-2's does, then applies `model`."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer

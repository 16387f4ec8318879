"""Tokenizers behind one small interface: trained here, from files, or from the hub."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rungs.common import hub
from rungs.common.errors import UserError, reason
from rungs.common.paths import is_file, is_folder, require_regular
from rungs.data.sentencepiece_model import SentencePieceModel
from rungs.data.tokenizer_config import ADDED_TOKENS_FILE, CONFIG_FILE, TokenizerConfig

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE, VOCABULARY_FILE, MERGES_FILE = "tokenizer.model", "vocab.json", "merges.txt"
END_OF_TEXT = "<|endoftext|>"
_ENDS_OF_TEXT = (END_OF_TEXT, "<|end_of_text|>", "<eos>", "</s>")
"""What tokenizers call it: GPT-2 and Qwen, Llama 3, Gemma (where </s> is an HTML tag), Llama and
Mistral. The ends of turns, <|eot_id|>, <|im_end|> and <end_of_turn>, separate no documents."""
SMALLEST_VOCAB = 257
"""The 256 bytes and the end of text."""
LARGEST_VOCAB = 1 << 24
"""Many times that of any published model."""
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
            UserError: for text that is not valid Unicode, or for which the tokenizer has no tokens.
        """
        return self.encode_batch([text])[0]

    def encode_prompt(self, text: str) -> list[int]:
        """As `encode`, with what the tokenizer's own template adds: the begin of text for models
        such as Llama, Gemma and Mistral, nothing for GPT-2 and tokenizers trained here.

        Raises:
            UserError: for text that is not valid Unicode.
        """
        return self._encode([text], add_special_tokens=True)[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """As `encode`, for several texts, on all cores."""
        return self._encode(texts, add_special_tokens=False)

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        try:
            encodings = self._tokenizer.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except TypeError:
            raise UserError("the text holds half a character (a lone surrogate)") from None
        except Exception as error:  # the library raises no narrower type
            raise UserError(f"a text cannot be tokenized: {reason(error)}") from None
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
        if self._bytes_of is None:
            return len(self.decode(ids, skip_special_tokens=True).encode())
        numbers, counts = np.unique(np.asarray(ids, np.int64), return_counts=True)
        pairs = zip(numbers.tolist(), counts.tolist(), strict=True)
        return sum(count * self._bytes_of.get(number, 0) for number, count in pairs)

    @functools.cached_property
    def _bytes_of(self) -> dict[int, int] | None:
        """For each id of a byte-level tokenizer, how many bytes it stands for."""
        decoder = json.loads(self._tokenizer.to_str()).get("decoder") or {}
        if decoder.get("type") != "ByteLevel":
            return None
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        # byte-level tokens spell each byte as one character
        counts = {number: len(token) for token, number in vocabulary.items()}
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            counts[number] = 0 if added.special else len(added.content.encode())
        return counts

    @functools.cached_property
    def definition(self) -> str:
        """All that the ids of a text depend on, but not what is added around them."""
        definition = json.loads(self._tokenizer.to_str())
        del definition["post_processor"]
        return json.dumps(definition)

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
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return Tokenizer(tokenizer)


def _byte_level(model: models.BPE, *, add_prefix_space: bool = False) -> tokenizers.Tokenizer:
    """A tokenizer that splits text as GPT-2's does."""
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


# Loading

_Find = Callable[[str], Path | None]
"""Where a file of a tokenizer is, by its name; None where there is none."""


def load_tokenizer(place: Path | str) -> Tokenizer:
    """Load a tokenizer from a folder, from a file, or, for a string that names neither, from the
    model of that id on the hub (or the hub's local cache).

    In a folder and on the hub it is `tokenizer.json`, else `tokenizer.model` (SentencePiece, as
    OpenLLaMA has it), else `vocab.json` with `merges.txt` (GPT-2's own files). For the latter two,
    `tokenizer_config.json` and `added_tokens.json` are heeded.

    Raises:
        UserError: where there is none, it is damaged or unsupported, or the hub cannot be reached.
    """
    path = Path(place)
    if is_folder(path):
        find, missing = _finder(path), f"{path}: holds no tokenizer, neither {TOKENIZER_FILE}"
    elif isinstance(place, str) and not is_file(path) and _may_be_hub_id(place):
        find = functools.partial(_on_hub, place)
        missing = f"{TOKENIZER_FILE} of {place}: not on the Hugging Face hub"
    elif path.suffix == ".model":
        return _from_sentencepiece(path, _finder(path.parent))
    else:
        return _read(path)
    if found := _from_files(find):
        return found
    raise UserError(f"{missing} nor {SENTENCEPIECE_FILE} nor {VOCABULARY_FILE} with {MERGES_FILE}")


def _may_be_hub_id(place: str) -> bool:
    is_file = place.endswith(".model") or ".json" in place
    return place.count("/") <= 1 and not place.startswith((".", "/")) and not is_file


def _finder(folder: Path) -> _Find:
    return lambda name: folder / name if is_file(folder / name) else None


def _on_hub(model: str, name: str) -> Path | None:
    try:
        return hub.model_file(model, name)
    except hub.NotOnHub:
        return None


def _from_files(find: _Find) -> Tokenizer | None:
    if path := find(TOKENIZER_FILE):
        return _read(path)
    if path := find(SENTENCEPIECE_FILE):
        return _from_sentencepiece(path, find)
    if (vocabulary := find(VOCABULARY_FILE)) and (merges := find(MERGES_FILE)):
        return _from_gpt2_files(vocabulary, merges, find)
    return None


def _read(path: Path) -> Tokenizer:
    try:
        require_regular(path)
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path}: no such tokenizer file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable tokenizer file: {reason(error)}") from None
    loaded: Any
    try:
        loaded = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the library raises no narrower type
        raise UserError(f"{path}: not a tokenizer file: {reason(error)}") from None
    return _checked(Tokenizer(loaded), path)


def _checked(tokenizer: Tokenizer, path: Path) -> Tokenizer:
    """Refuse ids that no model has (the library takes time for each below the largest), and those
    that stand for nothing around a prompt."""
    if tokenizer.vocab_size > LARGEST_VOCAB:
        raise UserError(
            f"{path}: has the token id {tokenizer.vocab_size - 1}; supported are ids below"
            f" {LARGEST_VOCAB}"
        )
    try:
        around = tokenizer.encode_prompt("")
    except UserError as error:
        raise UserError(f"{path}: {reason(error)}") from None
    if max(around, default=0) >= max(tokenizer.vocab_size, 1):
        raise UserError(f"{path}: puts ids around a prompt that are no tokens: {around}")
    return tokenizer


def _from_sentencepiece(path: Path, find: _Find) -> Tokenizer:
    config = TokenizerConfig.read(find(CONFIG_FILE), find(ADDED_TOKENS_FILE))
    try:
        require_regular(path)
        model = SentencePieceModel.from_bytes(path.read_bytes())
        if config.add_prefix_space is not None:
            model = model._replace(adds_dummy_prefix=config.add_prefix_space)
        loaded = model.to_tokenizer(prefix_after_special_tokens=bool(config.legacy))
        config.add_tokens(loaded)
        config.add_template(loaded, bos=model.bos, eos=model.eos, adds_bos=True)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(
            f"{path}: no tokenizer can be made of this SentencePiece model: {reason(error)}; get"
            f" it anew, or get the model's {TOKENIZER_FILE}, which transformers writes"
        ) from None
    return Tokenizer(loaded)


def _from_gpt2_files(vocabulary: Path, merges: Path, find: _Find) -> Tokenizer:
    config = TokenizerConfig.read(find(CONFIG_FILE), find(ADDED_TOKENS_FILE))
    if config.tokenizer_class not in (None, "GPT2Tokenizer", "GPT2TokenizerFast"):
        raise UserError(
            f"{vocabulary}: belongs to a {config.tokenizer_class}, which splits text in its own"
            f" way; get the model's {TOKENIZER_FILE}, which transformers writes"
        )
    try:
        model = models.BPE.from_file(str(vocabulary), str(merges))
        loaded = _byte_level(model, add_prefix_space=bool(config.add_prefix_space))
        if unknown := set(pre_tokenizers.ByteLevel.alphabet()) - loaded.get_vocab().keys():
            raise ValueError(f"{len(unknown)} of the 256 bytes are not in it")
        if loaded.token_to_id(END_OF_TEXT) is not None:
            loaded.add_special_tokens([END_OF_TEXT])
        config.add_tokens(loaded)
        end = END_OF_TEXT if END_OF_TEXT in loaded.get_vocab() else None
        config.add_template(loaded, bos=end, eos=end, adds_bos=False)
    except Exception as error:  # the library raises no narrower type
        raise UserError(
            f"{vocabulary}, {merges.name}: not the vocabulary and merges of a GPT-2 tokenizer:"
            f" {reason(error)}; get both anew"
        ) from None
    return _checked(Tokenizer(loaded), vocabulary)

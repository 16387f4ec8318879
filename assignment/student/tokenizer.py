"""Byte-level BPE: learn merges from text, then encode and decode with them (Sennrich et al. 2016,
https://arxiv.org/abs/1508.07909). Task: `assignment/tasks/tokenizer.md`.

Text is cut into pieces, the words of `PATTERN` and the special tokens. A token never reaches over
the end of a piece.
"""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import regex

PATTERN = regex.compile(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
"""How GPT-2 splits text into words (Radford et al. 2019): endings such as 's; letters, digits or
other signs, each with a space before them if there is one; and the white space that is left."""
Pair = tuple[bytes, bytes]


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
    raise NotImplementedError("train_bpe: see assignment/tasks/tokenizer.md")


def merge_pair(tokens: list[bytes], pair: Pair) -> list[bytes]:
    """Return a word with each occurrence of a pair joined, from left to right."""
    raise NotImplementedError("merge_pair: see assignment/tasks/tokenizer.md")


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
        raise NotImplementedError("Tokenizer.__init__: see assignment/tasks/tokenizer.md")

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text. The name of a special token becomes that token."""
        raise NotImplementedError("Tokenizer.encode: see assignment/tasks/tokenizer.md")

    def encode_iterable(self, texts: Iterable[str]) -> Iterator[int]:
        """Yield the token ids of a text that comes in parts, such as the lines of an open file:
        those of `encode` for the whole text, with only a part of it in memory at a time."""
        raise NotImplementedError("Tokenizer.encode_iterable: see assignment/tasks/tokenizer.md")

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids. Bytes that are not UTF-8 become U+FFFD, as ids may stop
        inside a character."""
        raise NotImplementedError("Tokenizer.decode: see assignment/tasks/tokenizer.md")

    def save(self, folder: Path | str) -> None:
        """Write `vocab.json`, `merges.txt` and `added_tokens.json` into a folder, in the format of
        GPT-2, in which every byte is a printable character."""
        raise NotImplementedError("Tokenizer.save: see assignment/tasks/tokenizer.md")

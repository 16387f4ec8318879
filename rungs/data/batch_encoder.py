"""Encode many texts fast: byte-level BPE tokenizers through tiktoken, all others as they are.

tiktoken merges by rank, so it can stand in for a tokenizer whose token ids are in the order of its
merges, as GPT-2's, Llama 3's and those trained here. The first texts are encoded both ways; should
they ever differ, tiktoken isn't used.
"""

import itertools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tiktoken

from rungs.data.tokenizer import Tokenizer

logger = logging.getLogger("rungs.dataset")

_GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""What ByteLevel splits at: https://github.com/openai/gpt-2/blob/master/src/encoder.py"""
_CHECKED_CHARACTERS = 1 << 18


class BatchEncoder:
    """Encodes batches of texts on all cores, with the ids of `Tokenizer.encode`.

    Args:
        tokenizer: of any kind.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._fast = as_tiktoken(tokenizer)
        self._unchecked = _CHECKED_CHARACTERS
        self._pool = ThreadPoolExecutor(os.cpu_count())

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32.

        Raises:
            UserError: the tokenizer has no tokens for a text.
        """
        if self._fast is not None and self._unchecked > 0:
            self._check(texts)
        if self._fast is None:
            return self._encode_slowly(texts)
        return list(self._pool.map(self._fast_ids, texts))

    def _fast_ids(self, text: str) -> np.ndarray:
        assert self._fast is not None
        return self._fast.encode_to_numpy(text, allowed_special="all")

    def _encode_slowly(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.uint32) for ids in self._tokenizer.encode_batch(texts)]

    def _check(self, texts: Sequence[str]) -> None:
        """Encode the first of some texts both ways."""
        for text in texts:
            self._unchecked -= len(text)
            if self._fast_ids(text).tolist() != self._tokenizer.encode(text):
                logger.warning("tiktoken gives other ids than this tokenizer; going on without it")
                self._fast = None
            if self._fast is None or self._unchecked <= 0:
                return


def as_tiktoken(tokenizer: Tokenizer) -> tiktoken.Encoding | None:
    """Return the same tokenizer for tiktoken, or None if tiktoken has nothing that could be it."""
    parts = json.loads(tokenizer.definition)
    model, added = parts["model"], parts["added_tokens"]
    pattern = _pattern(parts["pre_tokenizer"])
    is_plain = all(token["special"] and not token["lstrip"] | token["rstrip"] for token in added)
    if model["type"] != "BPE" or parts["normalizer"] or pattern is None or not is_plain:
        return None
    special = {token["content"]: token["id"] for token in added}
    ranks = _ranks(model, special)
    if ranks is None:
        return None
    return tiktoken.Encoding(
        "rungs", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return the pattern of the pieces that merges stay within, None if there is no such one."""
    match pre_tokenizer:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}:
            return _GPT2_PATTERN
        case {
            "type": "Sequence",
            "pretokenizers": [
                {
                    "type": "Split",
                    "pattern": {"Regex": str(regex)},
                    "behavior": "Isolated",
                    "invert": False,
                },
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        }:
            return regex
    return None


def _ranks(model: dict[str, Any], special: dict[str, int]) -> dict[bytes, int] | None:
    """Return the id of each token's bytes, None unless ids are in the order of merges."""
    vocabulary = {token: rank for token, rank in model["vocab"].items() if token not in special}
    spelled = dict(_byte_characters())
    merged = [vocabulary.get("".join(_pair(merge)), -1) for merge in model["merges"]]
    singles = {token for token in vocabulary if len(token) == 1}
    in_order = all(rank < following for rank, following in itertools.pairwise(merged))
    is_complete = len(merged) + len(singles) == len(vocabulary) and singles == set(spelled)
    if not merged or not in_order or merged[0] < 0 or not is_complete:
        return None
    return {bytes(spelled[c] for c in token): rank for token, rank in vocabulary.items()}


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _byte_characters() -> Iterator[tuple[str, int]]:
    """Yield the character that byte-level tokenizers spell each byte with: itself if it can be
    printed, else one from U+0100 on."""
    following = 0x100
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            yield chr(byte), byte
        else:
            yield chr(following), byte
            following += 1

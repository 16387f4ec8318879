"""Encode many texts fast: byte-level BPE tokenizers through tiktoken, others through their own
library. tiktoken merges by rank, so it fits tokenizers whose ids are in merge order, such as
GPT-2's and those trained here."""

import itertools
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import tiktoken
import tokenizers

from rungs.data.text.tokenizer import Tokenizer, byte_characters

_GPT2_PATTERN = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
"""The pattern of ByteLevel: https://github.com/openai/gpt-2/blob/master/src/encoder.py"""
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
KNOWN_PATTERNS = {
    "GPT-4 and Llama 3": rf"{_CONTRACTIONS}|\p{{N}}{{1,3}}|{_OTHERS}",
    "Qwen 2": rf"{_CONTRACTIONS}|\p{{N}}|{_OTHERS}",
}
"""Patterns that both libraries split alike. Others may differ, as their regular expressions do, and
tiktoken drops text that no pattern matches."""


class BatchEncoder:
    """Encodes batches of texts on all cores, with the same ids as `Tokenizer.encode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._fast = as_tiktoken(tokenizer)
        self._pool = ThreadPoolExecutor(os.cpu_count())

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32. Raises UserError if one has no tokens."""
        if self._fast is None:
            return [np.array(ids, np.uint32) for ids in self._tokenizer.encode_batch(texts)]
        return list(self._pool.map(self._fast_ids, texts))

    def _fast_ids(self, text: str) -> np.ndarray:
        assert self._fast is not None
        try:
            return self._fast.encode_to_numpy(text, allowed_special="all")
        except ValueError:  # its regular expressions fail on a million spaces
            return np.array(self._tokenizer.encode(text), np.uint32)


def as_tiktoken(tokenizer: Tokenizer) -> tiktoken.Encoding | None:
    """Return an equivalent tiktoken encoding, or None unless it certainly gives the same ids."""
    parts = json.loads(tokenizer.definition)
    pattern, added = _pattern(parts["pre_tokenizer"]), parts["added_tokens"]
    if parts["normalizer"] or pattern is None or not _are_found_alike(added):
        return None
    special = {token["content"]: token["id"] for token in added}
    ranks = _ranks(parts["model"], special)
    if ranks is None:
        return None
    return tiktoken.Encoding(
        "rungs", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
    )


def _are_found_alike(added: list[dict[str, Any]]) -> bool:
    """Whether both libraries find the same added tokens: none has conditions or begins another."""
    is_plain = all(
        token["special"] and not token["single_word"] | token["lstrip"] | token["rstrip"]
        for token in added
    )
    # normalized ones are searched for in what the others leave
    is_one_search = len({token["normalized"] for token in added}) <= 1
    contents = sorted(token["content"] for token in added)
    is_prefix_free = all(contents) and not any(
        longer.startswith(shorter) for shorter, longer in itertools.pairwise(contents)
    )
    return is_plain and is_one_search and is_prefix_free


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str | None:
    """Return the pattern that splits text into pieces for merging, None if there is none."""
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
        } if regex in KNOWN_PATTERNS.values():
            return regex
    return None


def _ranks(model: dict[str, Any], special: dict[str, int]) -> dict[bytes, int] | None:
    """Return the id of each token's bytes, None unless merging by rank equals applying the merges.

    That holds if each token is a byte or one merge of earlier tokens, ids are in merge order, and
    each token's own text encodes to that token. Then, when a token's rank comes up, its text inside
    a longer one has been merged as it would be alone, so only its own merge can produce it."""
    options = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    if model["type"] != "BPE" or any(model[option] for option in options):
        return None
    spelled = byte_characters()
    vocabulary = {token: rank for token, rank in model["vocab"].items() if token not in special}
    singles = {token: -1 for token in vocabulary if len(token) == 1}
    ranks = vocabulary | singles
    pairs = [each.split(" ") if isinstance(each, str) else each for each in model["merges"]]
    merged = [ranks.get("".join(pair), -1) for pair in pairs]
    are_built_up = all(
        max(ranks.get(part, rank) for part in pair) < rank
        for pair, rank in zip(pairs, merged, strict=True)
    )
    in_order = all(rank < following for rank, following in itertools.pairwise(merged))
    is_complete = len(merged) + len(singles) == len(vocabulary) and singles.keys() == spelled.keys()
    are_different = len(set(vocabulary.values())) == len(vocabulary)
    # with ignore_merges, a piece spelled like a special token would become that token
    no_piece_is_special = not any(
        set(name) <= spelled.keys() and not name.isascii() for name in special
    )
    if not (are_built_up and in_order and is_complete and are_different and no_piece_is_special):
        return None
    merging = tokenizers.Tokenizer.from_str(json.dumps({"model": model | {"ignore_merges": False}}))
    encodings = merging.encode_batch_fast(list(vocabulary), add_special_tokens=False)
    if [found.ids for found in encodings] != [[rank] for rank in vocabulary.values()]:
        return None
    return {bytes(spelled[c] for c in token): rank for token, rank in vocabulary.items()}

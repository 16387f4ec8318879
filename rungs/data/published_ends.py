"""Which tokens end a text, by the files that a tokenizer was published with."""

from collections.abc import Mapping
from pathlib import Path

from rungs.common.errors import UserError
from rungs.data.tokenizer import LARGEST_VOCAB, TextEnds, name_in
from rungs.data.tokenizer_config import (
    CONFIG_FILE,
    SPECIAL_TOKENS_FILE,
    FindFile,
    json_object,
    special_tokens,
)

MODEL_CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
END_FILES = (CONFIG_FILE, SPECIAL_TOKENS_FILE, MODEL_CONFIG_FILE, GENERATION_FILE)
"""The files that say what ends a text."""
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end|>")
"""What ends an answer of a model that was trained to chat, but does not separate documents."""


def published_ends(vocabulary: Mapping[str, int], find: FindFile) -> TextEnds | None:
    """Return what ends texts: the `eos_token` of the tokenizer, else the `eos_token_id` of the
    model; None if no file names either.

    Raises:
        UserError: a file is damaged.
    """
    name = special_tokens(find).get("eos_token")
    if name is not None and name in vocabulary:
        return _ends(name, vocabulary, f"the eos_token of {CONFIG_FILE}")
    names = {number: name for name, number in vocabulary.items()}
    for file in (MODEL_CONFIG_FILE, GENERATION_FILE):
        known = [names[number] for number in eos_token_ids(find(file)) if number in names]
        if known:
            return _ends(known[0], vocabulary, f"the eos_token_id of {file}")
    return None


def _ends(name: str, vocabulary: Mapping[str, int], source: str) -> TextEnds:
    separator = name_in(vocabulary) if name in _END_OF_TURN else None
    return TextEnds(vocabulary[separator or name], vocabulary[name], source)


def eos_token_ids(path: Path | None) -> tuple[int, ...]:
    """Return the ids that end a text by a `config.json` or `generation_config.json`; none if there
    is no file.

    Raises:
        UserError: it is damaged.
    """
    keys = json_object(path)
    inner = keys.get("text_config")
    eos = keys.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if not all(type(number) is int and 0 <= number < LARGEST_VOCAB for number in ids):
        raise UserError(f"{path}: eos_token_id: must be a token id or a list of token ids")
    return ids

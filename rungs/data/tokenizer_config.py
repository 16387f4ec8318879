"""Read the files beside a tokenizer's vocabulary, above all `tokenizer_config.json`: which tokens
end texts, and what older vocabulary files lack (`tokenizer.json` is complete). Keys:
https://huggingface.co/docs/transformers/main_classes/tokenizer"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import tokenizers
from tokenizers import AddedToken, processors

from rungs.common.errors import UserError, reason
from rungs.common.strict_json import read_text
from rungs.data.tokenizer import LARGEST_VOCAB, TextEnds, name_in

CONFIG_FILE, ADDED_TOKENS_FILE = "tokenizer_config.json", "added_tokens.json"
SPECIAL_TOKENS_FILE = "special_tokens_map.json"
MODEL_CONFIG_FILE, GENERATION_FILE = "config.json", "generation_config.json"
END_FILES = (CONFIG_FILE, SPECIAL_TOKENS_FILE, MODEL_CONFIG_FILE, GENERATION_FILE)
"""Files that may name the tokens that end texts."""
_END_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eot|>", "<end_of_turn>", "<turn|>", "<|end|>")
"""Tokens that end an answer of a chat model but do not separate documents."""
FindFile = Callable[[str], Path | None]
"""Function from a file name to its path; None if the tokenizer has no such file."""
_KEYS = {
    "tokenizer_class": str,
    **dict.fromkeys(("add_bos_token", "add_eos_token", "add_prefix_space", "legacy"), bool),
}
_TOKEN_KEYS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class TokenizerConfig(NamedTuple):
    """The keys that matter. A missing key is None, as its default depends on the tokenizer."""

    tokenizer_class: str | None
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_prefix_space: bool | None
    legacy: bool | None
    added_tokens: dict[int, AddedToken]
    """Tokens by id, some of which may be in the vocabulary already."""

    @classmethod
    def read(cls, find: FindFile) -> Self:
        """Read the two files, if they exist. Raises UserError if one is unreadable or malformed."""
        config, added_tokens = find(CONFIG_FILE), find(ADDED_TOKENS_FILE)
        keys = json_object(config)
        try:
            tokens = {
                int(number): AddedToken(content, special=True)
                for content, number in json_object(added_tokens).items()
            }
            tokens |= {
                int(number): _token(token)
                for number, token in keys.get("added_tokens_decoder", {}).items()
            }
            typed: dict[str, Any] = {key: keys.get(key) for key in _KEYS}
            for key, value in typed.items():
                if not isinstance(value, _KEYS[key] | None):
                    raise TypeError(f"{key} is {value!r}")
            return cls(**typed, added_tokens=tokens)
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            names = " or ".join(str(path) for path in (config, added_tokens) if path)
            raise UserError(f"{names}: not as transformers writes it: {reason(error)}") from None

    def add_tokens(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Add the tokens that the vocabulary lacks, and make texts match all of them. Raises
        ValueError if another token has a token's id, or a smaller id is unused."""
        for number, token in sorted(self.added_tokens.items(), key=lambda item: item[0]):
            tokenizer.add_tokens([token])
            if (found := tokenizer.token_to_id(token.content)) != number:
                raise ValueError(
                    f"{token.content!r} gets id {found}, not {number} as {CONFIG_FILE} or"
                    f" {ADDED_TOKENS_FILE} has it"
                )

    def add_template(
        self,
        tokenizer: tokenizers.Tokenizer,
        find: FindFile,
        *,
        bos: str | None,
        eos: str | None,
        adds_bos: bool,
    ) -> None:
        """Make the tokenizer add begin and end of text if the keys say so. `bos`, `eos` and
        `adds_bos` are the defaults of `bos_token`, `eos_token` and `add_bos_token`."""
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        named = {k: name for k, name in special_tokens(find).items() if name in vocabulary}
        bos, eos = named.get("bos_token", bos), named.get("eos_token", eos)
        starts = bos if self.add_bos_token or (self.add_bos_token is None and adds_bos) else None
        ends = eos if self.add_eos_token else None
        if special := {token for token in (starts, ends) if token is not None}:
            tokenizer.post_processor = processors.TemplateProcessing(
                [piece for piece in (starts, "$A", ends) if piece is not None],
                special_tokens=[(token, tokenizer.token_to_id(token)) for token in special],
            )


def _token(keys: Any) -> AddedToken:
    return AddedToken(keys["content"], **{key: keys[key] for key in _TOKEN_KEYS if key in keys})


def special_tokens(find: FindFile) -> dict[str, str]:
    """Return the special tokens by their names in transformers, such as `eos_token`. As there,
    `special_tokens_map.json` only counts if `tokenizer_config.json` has no added tokens. Raises
    UserError if a file is damaged."""
    keys = json_object(find(CONFIG_FILE))
    if "added_tokens_decoder" not in keys:
        keys |= json_object(find(SPECIAL_TOKENS_FILE))
    named = {key: value for key, value in keys.items() if key.endswith("_token")}
    texts = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in named.items()
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def json_object(path: Path | None) -> dict[str, Any]:
    """Return a file's JSON object, empty without a file. Raises UserError for other content."""
    if path is None:
        return {}
    text = read_text(path)
    try:
        keys = json.loads(text)
    except (RecursionError, ValueError) as error:
        raise UserError(f"{path}: not readable as JSON: {reason(error)}") from None
    if not isinstance(keys, dict):
        raise UserError(f"{path}: not a JSON object")
    return keys


def published_ends(vocabulary: Mapping[str, int], find: FindFile) -> TextEnds | None:
    """Return the tokens that end texts: the tokenizer's `eos_token`, else the model's
    `eos_token_id`; None if no file names either. Raises UserError if a file is damaged."""
    name = special_tokens(find).get("eos_token")
    if name is not None and name in vocabulary:
        return _ends(name, vocabulary, f"the eos_token of {CONFIG_FILE}")
    names = {number: name for name, number in vocabulary.items()}
    for file in (MODEL_CONFIG_FILE, GENERATION_FILE):
        if known := [names[number] for number in eos_token_ids(find(file)) if number in names]:
            return _ends(known[0], vocabulary, f"the eos_token_id of {file}")
    return None


def _ends(name: str, vocabulary: Mapping[str, int], source: str) -> TextEnds:
    separator = name_in(vocabulary) if name in _END_OF_TURN else None
    return TextEnds(vocabulary[separator or name], vocabulary[name], source)


def eos_token_ids(path: Path | None) -> tuple[int, ...]:
    """Return the end-of-text ids in a `config.json` or `generation_config.json`, empty without a
    file. Raises UserError if it is damaged."""
    keys = json_object(path)
    inner = keys.get("text_config")
    eos = keys.get("eos_token_id", inner.get("eos_token_id") if isinstance(inner, dict) else None)
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    if not all(type(number) is int and 0 <= number < LARGEST_VOCAB for number in ids):
        raise UserError(f"{path}: eos_token_id: must be a token id or a list of token ids")
    return ids

"""Read `tokenizer_config.json` and `added_tokens.json`, and apply them to a tokenizer.

Only older vocabulary files need them: a `tokenizer.json` contains all of this itself.
Keys: https://huggingface.co/docs/transformers/main_classes/tokenizer
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, Self

import tokenizers
from tokenizers import AddedToken, processors

from rungs.common.errors import UserError, reason
from rungs.common.strict_json import read_text

CONFIG_FILE, ADDED_TOKENS_FILE = "tokenizer_config.json", "added_tokens.json"
_TOKEN_KEYS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class TokenizerConfig(NamedTuple):
    """The keys that matter. A missing key is None: its default depends on the tokenizer."""

    tokenizer_class: str | None
    add_bos_token: bool | None
    add_eos_token: bool | None
    add_prefix_space: bool | None
    legacy: bool | None
    added_tokens: dict[int, AddedToken]
    """Tokens by id. The vocabulary may already have some of them."""

    @classmethod
    def read(cls, config: Path | None, added_tokens: Path | None) -> Self:
        """Read the two files. None stands for a file that does not exist.

        Raises:
            UserError: a file is unreadable or has other contents.
        """
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
            return cls(
                _typed(keys, "tokenizer_class", str),
                _typed(keys, "add_bos_token", bool),
                _typed(keys, "add_eos_token", bool),
                _typed(keys, "add_prefix_space", bool),
                _typed(keys, "legacy", bool),
                tokens,
            )
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            names = " or ".join(str(path) for path in (config, added_tokens) if path)
            raise UserError(f"{names}: not as transformers writes it: {reason(error)}") from None

    def add_tokens(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Add the tokens that the vocabulary lacks, and make texts match all of them.

        Raises:
            ValueError: a token cannot get its id: another token has it, or a smaller id is unused.
        """
        for number, token in sorted(self.added_tokens.items(), key=lambda item: item[0]):
            tokenizer.add_tokens([token])
            if (found := tokenizer.token_to_id(token.content)) != number:
                raise ValueError(
                    f"{token.content!r} gets id {found}, not {number} as {CONFIG_FILE} or"
                    f" {ADDED_TOKENS_FILE} has it"
                )

    def add_template(
        self, tokenizer: tokenizers.Tokenizer, *, bos: str | None, eos: str | None, adds_bos: bool
    ) -> None:
        """Make the tokenizer add begin and end of text to prompts, if the keys say so.

        Args:
            adds_bos: the default of `add_bos_token`.
        """
        starts = bos if self.add_bos_token or (self.add_bos_token is None and adds_bos) else None
        ends = eos if self.add_eos_token else None
        if special := {token for token in (starts, ends) if token is not None}:
            tokenizer.post_processor = processors.TemplateProcessing(
                [piece for piece in (starts, "$A", ends) if piece is not None],
                special_tokens=[(token, tokenizer.token_to_id(token)) for token in special],
            )


def _token(keys: Any) -> AddedToken:
    return AddedToken(keys["content"], **{key: keys[key] for key in _TOKEN_KEYS if key in keys})


def _typed(keys: dict[str, Any], key: str, kind: type) -> Any:
    value = keys.get(key)
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{key} is {value!r}")
    return value


def json_object(path: Path | None) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no file; raises UserError if it holds
    something else."""
    if path is None:
        return {}
    try:
        keys = json.loads(read_text(path))
    except (RecursionError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path}: not readable as JSON: {reason(error)}") from None
    if not isinstance(keys, dict):
        raise UserError(f"{path}: not a JSON object")
    return keys

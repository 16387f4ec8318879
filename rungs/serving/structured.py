"""Answers in JSON: what may follow a text is computed by llguidance
(https://github.com/guidance-ai/llguidance), as a mask of the next token."""

from typing import Any, Self

import numpy as np

from rungs.common.errors import UserError, reason
from rungs.common.shown_text import install_line
from rungs.data.text.tokenizer import Tokenizer

_ON_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Else a model could write spaces until its context ends."""


class Grammar:
    """What may follow in one answer. `matcher` is llguidance's."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def copy(self) -> Self:
        """Return one for another answer."""
        return type(self)(self._matcher.deep_copy())

    def allowed(self) -> np.ndarray:
        """Return which tokens may follow, a bit per token of the vocabulary in words of uint32."""
        return np.frombuffer(self._matcher.compute_bitmask(), np.uint32)

    def add(self, token: int) -> str:
        """Add the next token, and return what is wrong, empty if nothing is."""
        self._matcher.consume_token(token)
        return str(self._matcher.get_error()).partition("\n")[0]


class Grammars:
    """Makes the grammars of a model's answers. Raises UserError if llguidance is not installed."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, stop_tokens: tuple[int, ...]) -> None:
        try:
            import llguidance
        except ImportError as error:
            problem = f"llguidance is not installed ({reason(error)}): {install_line('structured')}"
            raise UserError(f"response_format: {problem}") from None
        if not stop_tokens:
            raise UserError("response_format: no token ends this model's texts")

        class Vocabulary:
            eos_token_id, bos_token_id = stop_tokens[0], None
            tokens = [tokenizer.bytes_of(number) for number in range(vocab_size)]  # noqa: RUF012
            special_token_ids = sorted({*tokenizer.special_ids, *stop_tokens})

            def __call__(self, text: str) -> list[int]:
                return tokenizer.continuing.encode(text)

        wrapped = llguidance.TokenizerWrapper(Vocabulary())
        self._tokens = llguidance.LLTokenizer(wrapped, eos_token=[*stop_tokens])
        self._matcher = llguidance.LLMatcher

    def of(self, schema: dict[str, Any]) -> Grammar:
        """Return the grammar of JSON with a schema, on one line. Raises UserError."""
        rules = self._matcher.grammar_from_json_schema(schema, overrides=_ON_ONE_LINE)
        matcher = self._matcher(self._tokens, rules, log_level=0)
        if problem := str(matcher.get_error()).partition("\n")[0]:
            raise UserError(f"response_format: {problem}")
        return Grammar(matcher)

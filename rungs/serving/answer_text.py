"""The text of a text's new tokens as they arrive, up to a stop string; where each token begins."""

import codecs
from collections.abc import Sequence

from rungs.checkpointing.load import continuation
from rungs.data.tokenizer import Tokenizer


class AnswerText:
    """Turns tokens into text that doesn't change later.

    Args:
        prompt: token ids before the answer.
        stops: the answer ends before the one of these strings that is complete first.

    Attributes:
        tokens: those added, up to the one that completes a stop string.
        text: what is certain so far.
        is_stopped: whether a stop string has ended it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._prompt, self._stops = tokenizer, list(prompt), stops
        self._before = tokenizer.decode(prompt, skip_special_tokens=True)
        self.tokens: list[int] = []
        self.text = ""
        self.is_stopped = False

    def add(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Add tokens, and return the text that has become certain: without what later tokens may
        change, and what may begin a stop string. `is_last` returns the rest."""
        if self.is_stopped:
            return ""
        self.tokens += tokens
        whole = self._whole(self.tokens) if is_last else self._settled()
        if (stop := self._first_stop(whole)) >= 0:
            self.is_stopped, whole = True, whole[:stop]
            while self._first_stop(self._whole(self.tokens[:-1])) >= 0:
                self.tokens.pop()
        elif not is_last:
            whole = whole[: len(whole) - self._open_length(whole)]
        new = whole[len(self.text) :]
        self.text += new
        return new

    def _whole(self, tokens: Sequence[int]) -> str:
        return continuation(self._tokenizer, self._prompt, tokens)

    def _first_stop(self, text: str) -> int:
        """Return where the stop string begins that ends first in a text, -1 if there is none."""
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        return min(found, default=(0, -1))[1]

    def _settled(self) -> str:
        """Return the part of the answer that further tokens can't change."""
        whole = self._tokenizer.decode_settled([*self._prompt, *self.tokens])
        return whole[len(self._before) :] if whole.startswith(self._before) else self.text

    def _open_length(self, text: str) -> int:
        """Return the length of the longest end of a text that begins a stop string."""
        longest = max(map(len, self._stops), default=0)
        ends = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in ends if any(s.startswith(text[-n:]) for s in self._stops)), 0)


class TokenOffsets:
    """Counts the characters of a text before each token. `before` are tokens that come before the
    text; without any that has text, a decoder may drop the first space."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._has_begun = any(map(tokenizer.bytes_of, before))
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._characters = 0
        self._run = b""
        """Byte tokens at the end: if they are not UTF-8, each becomes U+FFFD."""

    def add(self, token: int, name: str) -> int:
        """Return the characters before a token. `name` is what a special token adds."""
        content = self._tokenizer.bytes_of(token)
        if self._tokenizer.is_byte(token):
            self._has_begun = True
            self._run += content
            return self._characters + len(self._run[:-1].decode(errors="ignore"))
        self._characters += _length(self._run)
        offset, self._run = self._characters, b""
        if not self._has_begun and (content or name):
            self._has_begun = True
            if content.startswith(b" "):
                content = self._tokenizer.decode([token]).encode()
        self._characters += len(self._decoder.decode(content) if content else name)
        return offset


def _length(run: bytes) -> int:
    try:
        return len(run.decode())
    except UnicodeDecodeError:
        return len(run)

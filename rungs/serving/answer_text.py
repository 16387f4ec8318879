"""The text of a text's new tokens as they arrive, up to a stop string."""

from collections.abc import Sequence

from rungs.checkpointing.load import continuation
from rungs.data.tokenizer import Tokenizer


class AnswerText:
    """Turns tokens into text that doesn't change later.

    Args:
        prompt: token ids before the answer.
        stops: the answer ends before the first of these strings in it.

    Attributes:
        text: what is certain so far.
        is_stopped: whether a stop string has ended it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stops: Sequence[str]) -> None:
        self._tokenizer, self._prompt, self._stops = tokenizer, list(prompt), stops
        self._before = tokenizer.decode(prompt, skip_special_tokens=True)
        self._tokens: list[int] = []
        self.text = ""
        self.is_stopped = False

    def add(self, tokens: Sequence[int], is_last: bool = False) -> str:
        """Add tokens, and return the text that has become certain: without what later tokens may
        change, and what may begin a stop string. `is_last` returns the rest."""
        if self.is_stopped:
            return ""
        self._tokens += tokens
        whole = (
            continuation(self._tokenizer, self._prompt, self._tokens)
            if is_last
            else self._settled()
        )
        stop = min((place for s in self._stops if (place := whole.find(s)) >= 0), default=-1)
        if stop >= 0:
            self.is_stopped, whole = True, whole[:stop]
        elif not is_last:
            whole = whole[: len(whole) - self._open_length(whole)]
        new = whole[len(self.text) :]
        self.text += new
        return new

    def _settled(self) -> str:
        """Return the part of the answer that further tokens can't change."""
        whole = self._tokenizer.decode_settled([*self._prompt, *self._tokens])
        return whole[len(self._before) :] if whole.startswith(self._before) else self.text

    def _open_length(self, text: str) -> int:
        """Return the length of the longest end of a text that begins a stop string."""
        longest = max(map(len, self._stops), default=0)
        ends = range(min(longest - 1, len(text)), 0, -1)
        return next((n for n in ends if any(s.startswith(text[-n:]) for s in self._stops)), 0)

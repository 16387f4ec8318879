"""Finds stop strings in what a model wrote. They may hold the names of special tokens, such as
`<|im_end|>`, which a text of the tokens leaves out."""

from collections.abc import Sequence

from rungs.data.text.tokenizer import Tokenizer


class StopStrings:
    """Strings that end a text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        names = tokenizer.special_names
        self._with_special = [s for s in self._stops if any(name in s for name in names)]

    def first(self, text: str, tokens: Sequence[int] = ()) -> int:
        """Return where the stop string begins that is complete first in a text, -1 if there is
        none. `tokens` are those of the text, special ones included."""
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        shown = self._tokenizer.decode(tokens) if self._with_special else ""
        for stop in self._with_special:
            if (at := shown.find(stop)) >= 0:
                before, until = (
                    self._tokenizer.without_special_names(shown[:n]) for n in (at, at + len(stop))
                )
                first = max(text.find(before), 0)  # after a space that only a continuation has
                found.append((first + len(until), first + len(before)))
        return min(found, default=(0, -1))[1]

    def without_beginning(self, text: str, tokens: Sequence[int] = ()) -> str:
        """Return a text without an end that may be the beginning of a stop string; see `first`."""
        shown = self._tokenizer.decode(tokens) if self._with_special else ""
        begun = _begun(text, self._stops)
        begun_shown = self._tokenizer.without_special_names(_begun(shown, self._with_special))
        return text[: len(text) - max(len(begun), len(begun_shown))]


def _begun(text: str, stops: Sequence[str]) -> str:
    """Return the longest end of a text that begins a stop string."""
    longest = max(map(len, stops), default=0)
    ends = (text[-n:] for n in range(min(longest - 1, len(text)), 0, -1))
    return next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")

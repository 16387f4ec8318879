"""Finds stop strings in what a model wrote. They may hold the names of special tokens, such as
`<|im_end|>`, which a text of the tokens leaves out."""

from collections.abc import Sequence

from rungs.data.text.tokenizer import Tokenizer


class StopStrings:
    """Strings that end a text."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        names = tokenizer.special_names.values()
        self._with_special = [s for s in self._stops if any(name in s for name in names)]

    def first(self, text: str, tokens: Sequence[int] = ()) -> int:
        """Return where the stop string begins that is complete first in a text, -1 if there is
        none. `tokens` are those of the text, special ones included."""
        found = [(at + len(s), at) for s in self._stops if (at := text.find(s)) >= 0]
        shown, places = self._with_names(text, tokens)
        for stop in self._with_special:
            if (at := shown.find(stop)) >= 0:
                found.append((places[at + len(stop)], places[at]))
        return min(found, default=(0, -1))[1]

    def without_beginning(self, text: str, tokens: Sequence[int] = ()) -> str:
        """Return a text without an end that may be the beginning of a stop string; see `first`."""
        shown, places = self._with_names(text, tokens)
        begun = len(text) - len(_begun(text, self._stops))
        return text[: min(begun, places[len(shown) - len(_begun(shown, self._with_special))])]

    def _with_names(self, text: str, tokens: Sequence[int]) -> tuple[str, list[int]]:
        """Return a text with the names of its special tokens, if a stop string has any, and where
        in `text` each character of it, and its end, is."""
        decode, names = self._tokenizer.decode, self._tokenizer.special_names
        marks = [n for n, one in enumerate(tokens) if one in names] if self._with_special else []
        plain = decode(tokens, skip_special_tokens=True) if marks else text
        lead = int(text[:1] == " " != plain[:1])  # a space that only a continuation has
        shown, places, done = "", list[int](), 0
        for mark in marks:
            before, name = decode(tokens[:mark], skip_special_tokens=True), names[tokens[mark]]
            end = len(before) + (lead if before else 0)
            if end > len(text):  # it may still change
                break
            shown += text[done:end] + name
            places += [*range(done, end), *[end] * len(name)]
            done = end
        return shown + text[done:], [*places, *range(done, len(text) + 1)]


def _begun(text: str, stops: Sequence[str]) -> str:
    """Return the longest end of a text that begins a stop string."""
    longest = max(map(len, stops), default=0)
    ends = (text[-n:] for n in range(min(longest - 1, len(text)), 0, -1))
    return next((end for end in ends if any(stop.startswith(end) for stop in stops)), "")

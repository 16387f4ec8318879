"""Whether a decoder only adds to a text as tokens arrive, so that it can be shown before its end.

The decoders: https://docs.rs/tokenizers/latest/tokenizers/decoders/
"""

from typing import Any

_BY_TOKEN = ("Metaspace", "WordPiece", "ByteFallback")
"""Each token's text depends on whether it is the first, and bytes on their run."""
_WHOLE = ("Fuse", "ByteLevel")
"""What they return is one text, in which other decoders would see what they have seen before."""


def only_adds(decoder: dict[str, Any] | None) -> bool:
    """Return whether a decoder's text of some tokens begins its text of these and more.

    What bytes at the end stand for may change: U+FFFD at the end of a text, and the text of a run
    of byte tokens. False also stands for a decoder that isn't known.

    Args:
        decoder: as in `tokenizer.json`.
    """
    if decoder is None:  # tokens are joined with spaces
        return True
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    is_whole = False
    for part in parts:
        by_token = part["type"] in _BY_TOKEN or part["type"] in _WHOLE
        if (is_whole and by_token) or not (by_token or _keeps_place(part)):
            return False
        is_whole = is_whole or part["type"] in _WHOLE
    return True


def _keeps_place(part: dict[str, Any]) -> bool:
    """Whether a decoder changes a text one character at a time, or only at its start."""
    if part["type"] != "Replace":
        return bool(part["type"] == "Strip" and part["stop"] == 0)
    single = len(part["pattern"].get("String", "")) == 1
    return single and not part["content"].strip()

"""Numbers in completions, compared as text, so that no length of digits costs time.

`gsm8k` is the convention of that dataset (Cobbe et al. 2021): the answer follows `####`.
"""

import re

MARK = "####"
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_IN_TEXT = re.compile(rf"(?:(?<![0-9A-Za-z)])[-+−])?\$?(?:{_NUMBER})")
_ALONE = re.compile(rf"[-+−]?\s*\$?\s*(?:{_NUMBER})\s*%?\.?")


def last_number(text: str) -> str | None:
    """Return the last number of a text in normal form, None if there is none. A sign counts unless
    it follows a number, as in `7-3`."""
    found = _IN_TEXT.findall(text)
    return _normal(found[-1]) if found else None


def marked_number(text: str) -> str | None:
    """Return the number after `####` on its line in normal form, None unless there is exactly one
    mark with nothing but a number after it. With several marks a list of guesses would pass."""
    _, mark, after = text.partition(MARK)
    return None if not mark or MARK in after else whole_number(after.lstrip(" ").split("\n")[0])


def whole_number(text: str) -> str | None:
    """Return a text that is only a number in normal form, None for other texts."""
    return _normal(text.strip()) if _ALONE.fullmatch(text.strip()) else None


def _normal(number: str) -> str:
    """Return a number without thousands separators, currency, plus sign and needless zeros."""
    digits = "".join(c for c in number if c in "0123456789.").rstrip(".")
    whole, _, decimals = digits.partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    sign = "-" if number[0] in "-−" and (whole, decimals) != ("0", "") else ""
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"

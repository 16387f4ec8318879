"""The built-in verifiers, stateless functions of an item and a completion. In the built-in tasks a
completion may show its work first; its answer follows its only `=`. Numbers are compared as text,
as long ones would take time to parse."""

import ast
import itertools
import operator
import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from rungs.tasks.task import Item

MARK = "####"
"""Mark before the answer in GSM8K (Cobbe et al. 2021)."""
_NUMBER = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_IN_TEXT = re.compile(rf"(?:(?<![0-9A-Za-z)])[-+−])?\$?(?:{_NUMBER})")
_ALONE = re.compile(rf"[-+−]?\s*\$?\s*(?:{_NUMBER})\s*%?\.?")
PAIRS = {"(": ")", "[": "]", "{": "}", "<": ">"}
"""Closing bracket by opening bracket."""


class BuiltIn(NamedTuple):
    """A built-in verifier."""

    is_correct: Callable[[Item, str], bool]
    fits: Callable[[Item], object] = lambda _: True
    """Whether an item has what the verifier needs."""
    lacking: str = ""
    """Message about an item that doesn't fit."""

    def problem(self, item: Item) -> str | None:
        """Return what an item lacks for this verifier, or None."""
        return None if self.fits(item) else self.lacking


def final_answer(completion: str) -> str | None:
    """Return a completion's text after its only `=`, all of it without `=`, None with several."""
    parts = completion.split("=")
    return parts[-1].strip() if len(parts) <= 2 else None


def gsm8k_number(answer: str) -> str | None:
    """Return an item's number in normal form: the text after `####`, or the whole answer."""
    return marked_number(answer) or whole_number(answer)


def last_number(text: str) -> str | None:
    """Return a text's last number in normal form, or None. In `7-3` the `-` is not a sign."""
    found = _IN_TEXT.findall(text)
    return _normal(found[-1]) if found else None


def marked_number(text: str) -> str | None:
    """Return the number after `####` on its line in normal form; None unless there is exactly one
    mark, followed by a number only. With several marks a list of guesses would pass."""
    _, mark, after = text.partition(MARK)
    return None if not mark or MARK in after else whole_number(after.lstrip(" ").split("\n")[0])


def whole_number(text: str) -> str | None:
    """Return the number that makes up a whole text in normal form, or None."""
    return _normal(text.strip()) if _ALONE.fullmatch(text.strip()) else None


def _normal(number: str) -> str:
    """Return a number without thousands separators, currency, plus sign and needless zeros."""
    digits = "".join(c for c in number if c in "0123456789.").rstrip(".")
    whole, _, decimals = digits.partition(".")
    whole, decimals = whole.lstrip("0") or "0", decimals.rstrip("0")
    sign = "-" if number[0] in "-−" and (whole, decimals) != ("0", "") else ""
    return f"{sign}{whole}.{decimals}" if decimals else f"{sign}{whole}"


def _countdown(item: Item, completion: str) -> bool:
    """Whether the last line makes the target from the numbers, each at most (or exactly) once."""
    lines = completion.strip().splitlines()
    try:
        value, used = evaluate(lines[-1] if lines else "")
    except ExpressionError:
        return False
    given = Counter(item.info["numbers"])
    all_fit = Counter(used) == given if item.info.get("use_all") else Counter(used) <= given
    return all_fit and value == item.info["target"]


def _sorted(item: Item, completion: str) -> bool:
    answer = final_answer(completion)
    return answer is not None and _values(answer) == sorted(_values(item.answer) or [])


def _values(text: str) -> list[str] | None:
    """Return a text's digits, None if it has other characters than spaces and commas."""
    digits = text.replace(",", "").replace(" ", "")
    return list(digits) if digits.isascii() and digits.isdigit() else None


def _brackets(item: Item, completion: str) -> bool:
    answer = final_answer(completion)
    return answer is not None and open_brackets(item.info["brackets"] + answer) == ""


def open_brackets(text: str) -> str | None:
    """Return a text's unclosed brackets, None if one is closed wrongly or anything else is
    there."""
    stack: list[str] = []
    for character in text:
        if character in PAIRS:
            stack.append(character)
        elif not stack or PAIRS[stack.pop()] != character:
            return None
    return "".join(stack)


def _has_countdown(item: Item) -> bool:
    numbers, target = item.info.get("numbers"), item.info.get("target")
    return isinstance(numbers, list) and all(type(number) is int for number in [*numbers, target])


def _has_brackets(item: Item) -> bool:
    brackets = item.info.get("brackets")
    return isinstance(brackets, str) and brackets != ""


def _has_bits(item: Item) -> bool:
    bits = item.info.get("bits")
    return isinstance(bits, str) and bits != "" and not set(bits) - set("01")


BUILT_IN = {
    "exact": BuiltIn(lambda item, completion: completion.strip() == item.answer.strip()),
    "last_number": BuiltIn(
        lambda item, completion: last_number(completion) == last_number(item.answer),
        lambda item: last_number(item.answer),
        "answer: has no number",
    ),
    "gsm8k": BuiltIn(
        lambda item, completion: marked_number(completion) == gsm8k_number(item.answer),
        lambda item: gsm8k_number(item.answer),
        "answer: is not a number, nor has one after ####",
    ),
    "countdown": BuiltIn(
        _countdown, _has_countdown, 'info: needs {"numbers": [integers], "target": integer}'
    ),
    "sorted": BuiltIn(_sorted, lambda item: _values(item.answer), "answer: needs digits"),
    "brackets": BuiltIn(_brackets, _has_brackets, 'info: needs {"brackets": "text"}'),
    "parity": BuiltIn(
        lambda item, text: final_answer(text) == str(item.info["bits"].count("1") % 2),
        _has_bits,
        'info: needs {"bits": "zeros and ones"}',
    ),
}
"""Verifiers by their name in configs and items."""


# Arithmetic expressions from completions: integers, `+`, `-`, `*`, `/` and brackets, evaluated
# exactly and in bounded time. Python parses them, but nothing is run. There are no powers, and
# length, nesting and digits are limited, so no expression takes long or makes a large number.

MAX_CHARACTERS, MAX_DEPTH, MAX_DIGITS = 400, 32, 12
_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    **{ast.Add: operator.add, ast.Sub: operator.sub},
    **{ast.Mult: operator.mul, ast.Div: operator.truediv},
}


class ExpressionError(ValueError):
    """A text is not an expression, or is beyond the limits, or divides by zero."""


def evaluate(text: str) -> tuple[Fraction, tuple[int, ...]]:
    """Return the value of an expression and its integers from left to right. Raises ExpressionError
    if the text is not an expression, is too long, or divides by zero."""
    depth = max(itertools.accumulate((c == "(") - (c == ")") for c in text), default=0)
    is_long = len(text) > MAX_CHARACTERS or re.search(rf"[0-9]{{{MAX_DIGITS + 1}}}", text)
    if is_long or depth >= MAX_DEPTH or not re.fullmatch(r"[-+*/()0-9 ]+", text):
        raise ExpressionError(text)
    without_zeros = re.sub(r"(?<![0-9])0+(?=[0-9])", "", text.strip())
    numbers: list[int] = []

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(int(number)):
                numbers.append(number)
                return Fraction(number)
            case ast.UnaryOp(ast.USub(), operand):
                return -value(operand)
            case ast.BinOp(left, sign, right) if type(sign) in _OPERATORS:
                return _OPERATORS[type(sign)](value(left), value(right))
        raise ExpressionError(text)

    try:
        return value(ast.parse(without_zeros, mode="eval").body), tuple(numbers)
    except (SyntaxError, ZeroDivisionError):
        raise ExpressionError(text) from None

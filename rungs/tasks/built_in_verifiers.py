"""The built-in verifiers, stateless functions of an item and a completion. In the built-in tasks a
completion may show its work first; its answer follows its only `=`. Numbers are compared by value:
decimals, fractions (`5/2`), exponents (`1e3`)."""

import ast
import itertools
import operator
import re
from collections import Counter, deque
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from rungs.tasks.task import Item

MARK = "####"
"""Mark before the answer in GSM8K (Cobbe et al. 2021)."""
_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(
    rf"(?P<sign>[-+−–]?)(?:\$\s?)?(?P<inner_sign>[-+−–]?)(?P<digits>{_DIGITS})"
    rf"(?:[eE](?P<exponent>[-+]?[0-9]{{1,3}})(?![0-9])|\s?/\s?(?P<divisor>{_DIGITS}))?"
)
_ALONE = re.compile(rf"{_NUMBER.pattern}\s*%?\.?")
_MOST_CHARACTERS = 400
"""Characters of the longest number, as longer ones take time to parse."""
_EMPHASIS = re.compile(r"(?<![0-9)])\*\*|\*\*(?![0-9(])")
_GOES_ON_BEFORE = re.compile(
    r"[0-9A-Za-z_√^]\Z|[0-9][.:,]\Z|[0-9]\s:\s\Z|[0-9)]\s?x\s?\Z"
    r"|(?:[0-9)π]|\b(?:[A-Za-z]|pi))\s?(?:[-+−–±×·⋅∗÷/⁄^]|\*\*?)\s?\Z"
    r"|(?<!boxed)(?<!text)(?<!bf)\{\Z|\{,\}\Z|[0-9A-Za-z)−–-]\(\Z"
    r"|\\(?:cdot|times|div|pm|sqrt|log|ln|[dt]?frac)\s?\Z"
)
"""What shows that a number is the end of something else: a name, a time, an expression, also in
LaTeX."""
_GOES_ON_AFTER = re.compile(
    r"[0-9]|\^|[⁰¹²³⁴-⁹]|\s?π|[i√]\b|[xyz]\b|\s?\\?(?:pi|sqrt)\b|\s(?:thousand|[mbtr]+illion)\b"
)
_IN_GROUPS = re.compile(r"[0-9](?:['’]|[^\S\n])\Z")
"""Before the rest of `12 500`, `1'000` or `3 1/2`."""
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


def item_number(answer: str) -> Fraction | None:
    """Return an item's number: the one after `####`, or the whole answer."""
    return number(answer) if (marked := marked_number(answer)) is None else marked


def last_number(text: str) -> Fraction | None:
    """Return a text's last number; None without one, or if it is part of something else that has
    another value, such as `7-3`, `12:30`, `10^5`, `x2`, `3 1/2`, `\\sqrt{2}` or `(2, 3)`."""
    text = _EMPHASIS.sub(" ", text)
    last = next(iter(deque(_NUMBER.finditer(text), 1)), None)
    if last is None:
        return None
    before, after = text[max(last.start() - 9, 0) : last.start()], text[last.end() :]
    in_tuple = re.search(r"[0-9]\s?[,;]\s?\Z", before) and re.match(r"\s?\\?[)\]}>]", after)
    is_rest = _IN_GROUPS.search(before) and (last["divisor"] or len(last["digits"]) == 3)
    goes_on = is_rest or _GOES_ON_BEFORE.search(before) or _GOES_ON_AFTER.match(after)
    is_last = re.search(r"[0-9]", after) is None
    return _value(last) if is_last and not goes_on and not in_tuple else None


def marked_number(text: str) -> Fraction | None:
    """Return the number after `####` on its line; None unless there is exactly one mark, followed
    by a number only. With several marks a list of guesses would pass."""
    _, mark, after = text.partition(MARK)
    return None if not mark or MARK in after else number(after.lstrip(" ").split("\n")[0])


def number(text: str) -> Fraction | None:
    """Return the number that makes up a whole text, or None."""
    found = _ALONE.fullmatch(text.strip())
    return _value(found) if found else None


def _value(found: re.Match[str]) -> Fraction | None:
    """Return the value of a number; None if it is very long, or a division by zero."""
    if len(found[0]) > _MOST_CHARACTERS:
        return None
    digits, divisor = (
        Fraction((found[name] or "1").replace(",", "")) for name in ("digits", "divisor")
    )
    sign = -1 if {found["sign"], found["inner_sign"]} & {*"-−–"} else 1
    power = Fraction(10) ** int(found["exponent"] or 0)
    return sign * digits * power / divisor if divisor else None


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


def _has_digits(item: Item) -> bool:
    """Whether an answer is digits, `123` or `1, 2, 3`, and not numbers of several, `12, 3`."""
    parts = re.split(r"[, ]+", item.answer.strip())
    return all(map(_values, parts)) and (len(parts) == 1 or max(map(len, parts)) == 1)


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
    if not isinstance(numbers, list) or not numbers:
        return False
    are_whole = all(type(number) is int for number in [*numbers, target])
    return are_whole and all(0 <= number < 10**MAX_DIGITS for number in numbers)


def _has_brackets(item: Item) -> bool:
    brackets = item.info.get("brackets")
    return isinstance(brackets, str) and bool(open_brackets(brackets))


def _has_bits(item: Item) -> bool:
    bits = item.info.get("bits")
    return isinstance(bits, str) and bits != "" and not set(bits) - set("01")


_NO_NUMBER = "answer: is not a number, nor has one after ####"
BUILT_IN = {
    "exact": BuiltIn(lambda item, completion: completion.strip() == item.answer.strip()),
    "last_number": BuiltIn(
        lambda item, completion: last_number(completion) == item_number(item.answer),
        lambda item: item_number(item.answer) is not None,
        _NO_NUMBER,
    ),
    "gsm8k": BuiltIn(
        lambda item, completion: marked_number(completion) == item_number(item.answer),
        lambda item: item_number(item.answer) is not None,
        _NO_NUMBER,
    ),
    "countdown": BuiltIn(
        _countdown, _has_countdown, 'info: needs {"numbers": [integers from 0], "target": integer}'
    ),
    "sorted": BuiltIn(_sorted, _has_digits, "answer: needs digits, as in 0123 or 0, 1, 2, 3"),
    "brackets": BuiltIn(
        _brackets, _has_brackets, 'info: needs {"brackets": "text with open ones"}'
    ),
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

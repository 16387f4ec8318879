"""Arithmetic expressions from completions, evaluated exactly and in bounded time.

    sum      = product (("+" | "-") product)*
    product  = factor (("*" | "/") factor)*
    factor   = "-" factor | "(" sum ")" | integer

There are no powers, and length, nesting and digits are limited, so no expression takes long or
makes a large number. Python's `eval` and sympy's `parse_expr` would run code.
"""

import re
from fractions import Fraction
from typing import NamedTuple

MAX_CHARACTERS, MAX_DEPTH, MAX_DIGITS = 400, 32, 12
_TOKENS = re.compile(r"[0-9]+|[-+*/()]")


class ExpressionError(ValueError):
    """A text is not an expression, or is beyond the limits, or divides by zero."""


class Expression(NamedTuple):
    """An evaluated expression."""

    value: Fraction
    numbers: tuple[int, ...]
    """The integers in it, from left to right."""


def evaluate(text: str) -> Expression:
    """Return the value of an expression and the numbers that it uses. Raises ExpressionError if the
    text is no expression, too long, or divides by zero."""
    walker = _Walker(_tokens(text))
    value = walker.sum()
    if walker.next is not None:
        raise ExpressionError(f"unexpected {walker.next}")
    return Expression(value, tuple(walker.numbers))


def _tokens(text: str) -> list[str]:
    if len(text) > MAX_CHARACTERS:
        raise ExpressionError(f"longer than {MAX_CHARACTERS} characters")
    if rest := _TOKENS.sub("", text).replace(" ", ""):
        raise ExpressionError(f"unexpected {rest[0]}")
    tokens = _TOKENS.findall(text)
    if max(map(len, tokens), default=0) > MAX_DIGITS:
        raise ExpressionError(f"a number of more than {MAX_DIGITS} digits")
    return tokens


class _Walker:
    """Reads tokens from left to right; a method for each rule of the grammar."""

    def __init__(self, tokens: list[str]) -> None:
        self.numbers: list[int] = []
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    @property
    def next(self) -> str | None:
        """The token that is not read yet, None at the end."""
        return self._tokens[self._place] if self._place < len(self._tokens) else None

    def sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+", "-"):
            right = self._product()
            value = value + right if sign == "+" else value - right
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while sign := self._take("*", "/"):
            right = self._factor()
            if sign == "/" and not right:
                raise ExpressionError("division by zero")
            value = value * right if sign == "*" else value / right
        return value

    def _factor(self) -> Fraction:
        if self._depth == MAX_DEPTH:
            raise ExpressionError(f"nested more than {MAX_DEPTH} deep")
        self._depth += 1
        if self._take("-"):
            value = -self._factor()
        elif self._take("("):
            value = self.sum()
            if not self._take(")"):
                raise ExpressionError("a bracket is not closed")
        else:
            token = self.next
            if token is None or not token.isdigit():
                raise ExpressionError(f"unexpected {token or 'end'}")
            self._place += 1
            self.numbers.append(int(token))
            value = Fraction(token)
        self._depth -= 1
        return value

    def _take(self, *tokens: str) -> str | None:
        """Return the next token and go on if it is one of these, otherwise None."""
        token = self.next
        if token not in tokens:
            return None
        self._place += 1
        return token

"""Pseudorandom choices that are the same on every machine and in every version of Python.

Only `random.random()` is used: Python guarantees its sequence for a seed, but no other function's.
"""

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """Pseudorandom choices that depend only on a seed and a number."""

    def __init__(self, seed: int, number: int) -> None:
        self._random = random.Random(f"{seed}/{number}")

    def below(self, limit: int) -> int:
        """Return an integer of at least 0 and less than `limit`."""
        return int(self._random.random() * limit)

    def between(self, least: int, most: int) -> int:
        """Return an integer from `least` to `most`."""
        return least + self.below(most - least + 1)

    def one_of(self, values: Sequence[T]) -> T:
        """Return one of the values."""
        return values[self.below(len(values))]

    def text(self, characters: str, length: int) -> str:
        """Return a text of independently chosen characters."""
        return "".join(self.one_of(characters) for _ in range(length))

    def number(self, least_digits: int, most_digits: int) -> int:
        """Return an integer of which each number of digits is as likely; the first one is not 0
        unless it is alone."""
        digits = self.between(least_digits, most_digits)
        if digits == 1:
            return self.below(10)
        return int(self.text("123456789", 1) + self.text("0123456789", digits - 1))

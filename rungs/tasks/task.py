"""A task: training and held-out items (prompts with answers), and how answers are written; the
verdict on an answer; items that are pseudorandom draws.

Both splits draw candidates, items that are a pure function of a number, from different numbers. As
these can give the same prompt, a rule decides which split a prompt may be in. For built-in tasks it
is a hash of the prompt alone: a prompt held out from one run is held out from all."""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeVar

from rungs.common.errors import UserError

ITEMS = 1 << 30
"""Number of training candidates. Validation uses the following numbers."""
HELD_OUT_PART = 10
"""One in this many prompts is held out."""
CORRECT = "correct"
"""Name of a reward that alone decides whether a completion is correct."""
_STRIDE = 748_561_459  # a prime
_TRIES = 200
_ADVICE = "change its settings so that there are more prompts"
Status = Literal["ok", "timeout", "error", "out_of_memory"]
T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """A prompt, its answer, and other inputs of its verifier, all representable in JSON."""

    prompt: str
    answer: str
    """The answer alone, without work."""
    info: dict[str, Any] = field(default_factory=dict)
    verifier: str | None = None
    """Name of the built-in verifier for this item; None for the task's."""

    @property
    def prompt_hash(self) -> int:
        """A 64-bit hash of the prompt alone."""
        digest = hashlib.sha256(self.prompt.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8])


class Items(Protocol):
    """Items by index, the same on every machine."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Item: ...


@dataclass(frozen=True)
class Task:
    """A task, as provided by its source."""

    name: str
    train: Items
    validation: list[Item]
    """Held-out items, whose prompts are not in `train`."""
    verifier: str
    """Name of the source's own verifier, for items that don't name one."""
    worked: Callable[[Item], str]
    """Returns a right completion, with its work where the source has one."""
    short: Callable[[Item], str]
    """Returns a right completion without work."""
    alphabet: str | None = None
    """Characters of prompts and answers, for a character tokenizer; None if unknown."""
    sha256: dict[str, str] = field(default_factory=dict)
    """Checksums of the files that items were read from."""


@dataclass(frozen=True)
class Verdict:
    """The rewards of a completion, and whether it is correct."""

    rewards: dict[str, float] = field(default_factory=dict)
    """Parts of the reward by name; none if the verifier failed."""
    status: Status = "ok"
    """Outcome of the verifier."""
    message: str = ""
    """What went wrong, in one line; empty if nothing did."""

    @classmethod
    def of(cls, is_correct: bool) -> Self:
        """Return a reward of 1 for a correct completion, otherwise 0."""
        return cls({CORRECT: float(is_correct)})

    @property
    def total(self) -> float:
        """Sum of the rewards."""
        return math.fsum(self.rewards.values())

    @property
    def correct(self) -> bool:
        """Whether the reward named `correct`, or else the total, is at least 1."""
        return self.rewards.get(CORRECT, self.total) >= 1


Draw = Callable[[int], Item]
"""From a number below 2 × ITEMS to its candidate."""
Rule = Callable[[Item], bool]
"""Whether an item is for validation."""


class Draws:
    """Pseudorandom choices that depend only on a seed and a number, on every machine and Python
    version: only `random.random()` is used, whose sequence Python guarantees."""

    def __init__(self, seed: int, number: int) -> None:
        self._random = random.Random(f"{seed}/{number}")

    def below(self, limit: int) -> int:
        """Return an integer from 0 to `limit` − 1."""
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
        """Return an integer whose number of digits is uniformly random, without leading zeros."""
        digits = self.between(least_digits, most_digits)
        if digits == 1:
            return self.below(10)
        return int(self.text("123456789", 1) + self.text("0123456789", digits - 1))


class TrainingItems:
    """The training items, practically without end."""

    def __init__(self, name: str, draw: Draw, held_out: Rule, count: int | None) -> None:
        self._name, self._draw, self._is_held_out = name, draw, held_out
        self._count = count or ITEMS

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Item:
        if not 0 <= index < self._count:
            raise IndexError(f"there is no item {index} of {self._count}")
        numbers = ((index + tried * _STRIDE) % ITEMS for tried in range(_TRIES))
        for item in map(self._draw, numbers):
            if not self._is_held_out(item):
                return item
        raise UserError(f"{self._name}: has too few different prompts; {_ADVICE}")


def held_out_items(name: str, draw: Draw, rule: Rule, count: int) -> list[Item]:
    """Return items for validation with distinct prompts. Raises UserError if there are too few."""
    different: dict[str, Item] = {}
    for item in filter(rule, map(draw, range(ITEMS, ITEMS + count * _TRIES))):
        if len(different) == count:
            break
        different.setdefault(item.prompt, item)
    if len(different) < count:
        raise UserError(
            f"{name}: validation_items: {count:,} is more than the {len(different):,} different"
            f" prompts found to hold out; use fewer, or {_ADVICE}"
        )
    return list(different.values())


def by_hash(item: Item) -> bool:
    """Whether an item's prompt hash assigns it to validation."""
    return item.prompt_hash % HELD_OUT_PART == 0

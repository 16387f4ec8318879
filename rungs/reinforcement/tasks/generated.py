"""Items that are generated when they are asked for, split into training and validation.

Both splits draw candidates: numbered items, a pure function of a number. A hash of its prompt says
which split an item may be in, so that none can be in both, whatever the numbers; their numbers are
also different. The hash takes neither seed nor settings into account: an item that is held out
from one run is held out from all of them.
"""

import functools
from collections.abc import Callable, Iterable

from rungs.common.errors import UserError
from rungs.reinforcement.tasks.item import Item

ITEMS = 1 << 30
"""How many items there are to train on. Validation uses the numbers that follow."""
HELD_OUT_PART = 10
"""One in this many prompts is held out."""
_STRIDE = 748_561_459  # a prime
_TRIES = 200

Draw = Callable[[int], Item]
"""Returns the candidate of a number below 2 × ITEMS."""


class TrainingItems:
    """The items to train on, without end for any practical purpose."""

    def __init__(self, name: str, draw: Draw, count: int = ITEMS) -> None:
        self._name, self._draw, self._count = name, draw, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Item:
        _require_index(index, self._count)
        numbers = ((index + tried * _STRIDE) % ITEMS for tried in range(_TRIES))
        for item in map(self._draw, numbers):
            if not is_held_out(item):
                return item
        raise UserError(f"{self._name}: has too few different prompts; {_ADVICE}")


class ValidationItems:
    """Held-out items, all with different prompts."""

    def __init__(self, name: str, draw: Draw, count: int) -> None:
        self._name, self._draw, self._count = name, draw, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Item:
        _require_index(index, self._count)
        return self._items[index]

    @functools.cached_property
    def _items(self) -> list[Item]:
        numbers = range(ITEMS, ITEMS + self._count * _TRIES)
        candidates = filter(is_held_out, map(self._draw, numbers))
        different = _without_repeats(candidates, self._count)
        if len(different) < self._count:
            raise UserError(
                f"{self._name}: validation_items: {self._count:,} is more than the"
                f" {len(different):,} different prompts found to hold out; use fewer, or {_ADVICE}"
            )
        return different


_ADVICE = "change its settings so that there are more prompts"


def is_held_out(item: Item) -> bool:
    """Whether an item belongs to validation."""
    return item.prompt_hash % HELD_OUT_PART == 0


def _without_repeats(items: Iterable[Item], count: int) -> list[Item]:
    """Return the first `count` items with different prompts, fewer if there are fewer."""
    found: dict[str, Item] = {}
    for item in items:
        if len(found) == count:
            break
        found.setdefault(item.prompt, item)
    return list(found.values())


def _require_index(index: int, count: int) -> None:
    if not 0 <= index < count:
        raise IndexError(f"there is no item {index} of {count}")

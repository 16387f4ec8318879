"""A task: training and held-out items (prompts with answers), and how answers are written."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


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


def all_of(items: Items) -> Iterator[Item]:
    """Yield the items in order."""
    return (items[index] for index in range(len(items)))


@dataclass(frozen=True)
class Task:
    """A task, as provided by its source."""

    name: str
    train: Items
    validation: Items
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

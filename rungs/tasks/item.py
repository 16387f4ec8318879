"""An item: a prompt and its answer."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Item:
    """A prompt, its answer, and what else its verifier needs. All of it can be written as JSON."""

    prompt: str
    answer: str
    """The answer alone, without work."""
    info: dict[str, Any] = field(default_factory=dict)
    verifier: str | None = None
    """Name of the built-in verifier for this item; None: the task's."""

    @property
    def prompt_hash(self) -> int:
        """A 64-bit number that depends only on the prompt."""
        digest = hashlib.sha256(self.prompt.encode("utf-8", "surrogatepass")).digest()
        return int.from_bytes(digest[:8])


class Items(Protocol):
    """Items by their index. The same index gives the same item on every machine."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Item: ...


def all_of(items: Items) -> Iterator[Item]:
    """Yield the items in order."""
    return (items[index] for index in range(len(items)))

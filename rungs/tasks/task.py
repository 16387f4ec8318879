"""A task: items to train on, held-out items, and how their answers are written."""

from collections.abc import Callable
from dataclasses import dataclass, field

from rungs.tasks.item import Item, Items


@dataclass(frozen=True)
class Task:
    """What a task's source provides."""

    name: str
    train: Items
    validation: Items
    """Held-out items. None of their prompts is in `train`."""
    verifier: str
    """Name of the source's own verifier, for items that don't name one."""
    worked: Callable[[Item], str]
    """Returns the text of a right completion that shows its work, where the source has one."""
    short: Callable[[Item], str]
    """Returns the text of a right completion without work."""
    alphabet: str | None = None
    """The characters of prompts and answers, for a tokenizer of one token per character; None if
    the source doesn't say."""
    sha256: dict[str, str] = field(default_factory=dict)
    """The checksum of each file that items were read from."""

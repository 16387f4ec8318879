"""Objects that other installed packages add to Rungs, declared as entry points
(https://packaging.python.org/en/latest/specifications/entry-points/)."""

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any

from rungs.common.errors import did_you_mean

OPTIMIZERS = "rungs.optimizers"
TRACKERS = "rungs.trackers"


def plugin_names(group: str) -> set[str]:
    """Return the names in a group of entry points. Imports none of them."""
    return {entry.name for entry in entry_points(group=group)}


def load_plugin(group: str, name: str) -> Any:
    """Import and return the object of this name in the group."""
    entry = next(entry for entry in entry_points(group=group) if entry.name == name)
    return entry.load()


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the error text for a name that is neither built in nor in another package."""
    choices = sorted(known)
    advice = did_you_mean(name, choices, f"there are {', '.join(choices)}")
    return f"no {kind} is called {name[:40]!r}; {advice}"

"""The trackers there are."""

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points

from rungs.common.errors import UserError
from rungs.tracking.tracker import TrackedRun, Tracker

OpenTracker = Callable[[TrackedRun], Tracker]
GROUP = "rungs.trackers"
"""Entry points of other packages."""


BUILT_IN = {
    "mlflow": "mlflow",
    "tensorboard": "tensorboardX",
    "trackio": "trackio",
    "wandb": "wandb",
}
"""The trackers of this package, each in the file `NAME_tracker`, with the module that the extra of
its name installs."""


def check_trackers(names: Sequence[str], place: str) -> None:
    """Check that trackers exist and are installed.

    Args:
        place: what names them, for messages.

    Raises:
        UserError: with a line for each that does not.
    """
    lines = [f"{place}: {line}" for name in names if (line := _problem(name))]
    if lines:
        raise UserError("\n".join(lines))


def _problem(name: str) -> str | None:
    if name in BUILT_IN:
        if importlib.util.find_spec(BUILT_IN[name]):
            return None
        return f"{name} is not installed; install it with the extra: uv sync --extra {name}"
    others = {entry.name for entry in entry_points(group=GROUP)}
    if name in others:
        return None
    known = sorted({*BUILT_IN, *others})
    close = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {close[0]}?" if close else f"there are {', '.join(known)}"
    return f"no tracker is called {name[:40]!r}; {meant}"


def find_tracker(name: str) -> OpenTracker:
    """Return the function that opens a run in a tracker that `check_trackers` has checked."""
    if name in BUILT_IN:
        module = importlib.import_module(f"rungs.tracking.{name}_tracker")
        opened: OpenTracker = module.open_tracker
        return opened
    [entry] = entry_points(group=GROUP, name=name)
    found: OpenTracker = entry.load()
    return found

"""The trackers there are."""

import importlib
import importlib.util
from collections.abc import Callable, Sequence

from rungs.common.errors import UserError
from rungs.common.plugins import TRACKERS, load_plugin, plugin_names, unknown_name
from rungs.tracking.tracker import TrackedRun, Tracker

OpenTracker = Callable[[TrackedRun], Tracker]

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
    if problems := [problem for name in names if (problem := _problem(name))]:
        raise UserError.at(place, problems)


def _problem(name: str) -> str | None:
    if name in BUILT_IN:
        if importlib.util.find_spec(BUILT_IN[name]):
            return None
        return f"{name} is not installed; install it with the extra: uv sync --extra {name}"
    others = plugin_names(TRACKERS)
    return None if name in others else unknown_name("tracker", name, {*BUILT_IN, *others})


def find_tracker(name: str) -> OpenTracker:
    """Return the function that opens a run in a tracker that `check_trackers` has checked."""
    if name in BUILT_IN:
        module = importlib.import_module(f"rungs.tracking.{name}_tracker")
        opened: OpenTracker = module.open_tracker
        return opened
    found: OpenTracker = load_plugin(TRACKERS, name)
    return found

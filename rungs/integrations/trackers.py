"""The interface of trackers, and the list of them."""

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rungs.common.errors import UserError
from rungs.common.plugins import TRACKERS, load_plugin, plugin_names, unknown_name
from rungs.run.records import Sample

PROJECT = "rungs"
"""Default project of runs in a tracker, unless its environment variables name another."""


class TrackedRun(NamedTuple):
    """A run as described to a tracker."""

    id: str
    """Unchanged by resuming; new after `--fresh` and `--from`."""
    name: str
    folder: Path
    """A folder in the run folder for this tracker's local files."""
    config: Mapping[str, Any]
    """The keys of both configs, with lineage, such as `train.learning_rate`."""
    last_step: int
    """The last step known to be sent, or −1."""


class Tracker(Protocol):
    """A run in a tracker. Methods may raise any exception; then the run is reopened later."""

    def last_step(self) -> int:
        """Return the tracker's last step, −1 for none; `TrackedRun.last_step` if unknown."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step's metrics, in order; the last step may be repeated with more metrics."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Add the texts that a checkpoint generated."""

    def log_chart(self, path: Path) -> None:
        """Add a chart, a PNG file, as of the last step."""

    def flush(self) -> None:
        """Return once the steps so far are stored, as far as the library can tell."""

    def finish(self, summary: Mapping[str, float]) -> None:
        """Add the final figures and scores, and close the run."""


OpenTracker = Callable[[TrackedRun], Tracker]

BUILT_IN = {name: name for name in ("mlflow", "tensorboard", "trackio", "wandb")}
BUILT_IN["tensorboard"] = "tensorboardX"
"""Module installed by each tracker's extra. Its class is `open_tracker` in `NAME_tracker.py`."""


def check_trackers(names: Sequence[str], place: str) -> None:
    """Check that trackers exist and are installed. Raises UserError with a line, beginning with
    `place`, for each that does not or is not."""
    if lines := [line for name in names if (line := _problem(name))]:
        raise UserError.at(place, lines)


def _problem(name: str) -> str | None:
    if name in BUILT_IN:
        if importlib.util.find_spec(BUILT_IN[name]):
            return None
        return f"{name} is not installed; install it with the extra: uv sync --extra {name}"
    others = plugin_names(TRACKERS)
    return None if name in others else unknown_name("tracker", name, {*BUILT_IN, *others})


def find_tracker(name: str) -> OpenTracker:
    """Return the function that opens a run in a tracker, after `check_trackers`."""
    if name in BUILT_IN:
        return importlib.import_module(f"rungs.integrations.{name}_tracker").open_tracker
    return load_plugin(TRACKERS, name)

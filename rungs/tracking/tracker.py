"""What a tracker does."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rungs.run.samples import Sample

PROJECT = "rungs"
"""Where runs go in a tracker, unless its own environment variables say otherwise."""


class TrackedRun(NamedTuple):
    """What a tracker is told of a run."""

    id: str
    """The same after each resume; another after `--fresh` and `--from`."""
    name: str
    folder: Path
    """For what the tracker stores on this disk: of this tracker alone, in the run folder."""
    config: Mapping[str, Any]
    """The keys of both configs, such as `train.learning_rate`, lineage included."""
    last_step: int
    """The last step that was sent before, as far as is known here; -1 for none."""


class Tracker(Protocol):
    """A run in a tracker. Any method may raise any exception; then the run is opened anew later."""

    def last_step(self) -> int:
        """Return the last step that the tracker has, -1 for none. If it can't tell, that of the
        `TrackedRun`."""

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the metrics of a step. Steps come in order; of the last one, metrics may follow that
        were not known before."""

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Add what a checkpoint said."""

    def log_chart(self, path: Path) -> None:
        """Add a chart, a PNG file, as of the last step."""

    def flush(self) -> None:
        """Return once the steps so far are stored, as far as the library says so."""

    def finish(self, summary: Mapping[str, float]) -> None:
        """Add the final figures and scores, and close the run."""

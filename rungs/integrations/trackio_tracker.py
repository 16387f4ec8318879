"""Trackio: its local store, or a Space if TRACKIO_SPACE_ID names one."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rungs.integrations.trackers import PROJECT, TrackedRun
from rungs.integrations.wandb_tracker import WandbTracker
from rungs.run.records import Sample


class TrackioTracker(WandbTracker):
    """The run, named by its name and id. Trackio has the interface of Weights & Biases."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        self._trackio: Any = trackio
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        space = os.environ.get("TRACKIO_SPACE_ID")
        name = f"{run.name}-{run.id}"
        self._last = run.last_step
        if not space:
            stored = trackio.SQLiteStorage.get_last_step(project, name)
            self._last = -1 if stored is None else int(stored)
        self._run: Any = trackio.init(
            project=project,
            name=name,
            space_id=space,
            config=dict(run.config),
            resume="allow",
            auto_log_gpu=False,
            embed=False,
        )

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        texts = {f"sample {one.kind}: {one.prompt}": one.text for one in samples}
        self._run.log(texts, step=step)

    def log_chart(self, path: Path) -> None:
        self._run.log({path.stem: self._trackio.Image(str(path))}, step=max(self._last, 0))

    def finish(self, summary: Mapping[str, float]) -> None:
        figures = {f"final {name}": value for name, value in summary.items()}
        self._run.log(figures, step=max(self._last, 0))
        self._run.finish()


open_tracker = TrackioTracker

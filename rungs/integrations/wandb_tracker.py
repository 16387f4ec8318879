"""Weights & Biases. Its own variables, such as WANDB_PROJECT and WANDB_MODE, apply."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rungs.integrations.trackers import PROJECT, TrackedRun
from rungs.run.records import Sample


class WandbTracker:
    """The run with the same id after each resume; offline, a folder of files per start, which
    `wandb sync` uploads as one run."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb: Any = wandb
        self._run: Any = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.id,
            name=run.name,
            dir=os.environ.get("WANDB_DIR", str(run.folder)),
            config=dict(run.config),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        # Online, a resumed run knows its next step.
        self._last = max(run.last_step, self._run.step - 1) if self._run.step else run.last_step

    def last_step(self) -> int:
        return self._last

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last = step
        self._run.log(dict(metrics), step=step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        rows = [[step, one.kind, one.prompt, one.text] for one in samples]
        table = self._wandb.Table(columns=["step", "kind", "prompt", "text"], data=rows)
        self._run.log({f"samples/{step}": table}, step=max(self._last, step))

    def log_chart(self, path: Path) -> None:
        image = self._wandb.Image(str(path))
        self._run.log({f"charts/{path.stem}": image}, step=max(self._last, 0))

    def flush(self) -> None:
        """Do nothing, as the library's own process or thread writes."""

    def finish(self, summary: Mapping[str, float]) -> None:
        self._run.summary.update(dict(summary))
        self._run.finish()


open_tracker = WandbTracker

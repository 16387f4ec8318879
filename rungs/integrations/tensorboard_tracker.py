"""TensorBoard: event files in `trackers/tensorboard/` of the run folder."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rungs.integrations.trackers import TrackedRun
from rungs.run.records import Sample


class TensorBoardTracker:
    """The run in event files; each resume adds another file."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        self._last = run.last_step
        number = len(list(run.folder.glob("events.*")))
        self._writer: Any = SummaryWriter(
            logdir=str(run.folder),
            flush_secs=3600,
            # Readers drop an earlier start's events for the steps that this one repeats.
            purge_step=max(self._last + 1, 0),
            # Two starts within a second would share a file; readers sort by name.
            filename_suffix=f".{number:06d}",
        )
        if self._last < 0:
            rows = [f"| {key} | `{json.dumps(value)}` |" for key, value in run.config.items()]
            table = "\n".join(["| key | value |", "|---|---|", *rows])
            self._writer.add_text("config", table, 0)

    def last_step(self) -> int:
        return self._last

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._last = step
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        for one in samples:
            text = f"    {one.prompt}\n\n    {one.text}".replace("\n", "\n    ")
            self._writer.add_text(f"samples/{one.kind}: {one.prompt[:60]}", text, step)

    def log_chart(self, path: Path) -> None:
        import numpy as np
        from matplotlib import image

        pixels = (image.imread(path)[..., :3] * 255).astype(np.uint8)
        self._writer.add_image(path.stem, pixels, max(self._last, 0), dataformats="HWC")

    def flush(self) -> None:
        self._writer.flush()

    def finish(self, summary: Mapping[str, float]) -> None:
        rows = [f"| {name} | {value:.6g} |" for name, value in summary.items()]
        table = "\n".join(["| figure | value |", "|---|---|", *rows])
        self._writer.add_text("final figures", table, max(self._last, 0))
        self._writer.close()


open_tracker = TensorBoardTracker

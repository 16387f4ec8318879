"""The interface of trackers, and those that are built in: each imports its library when it opens a
run."""

import importlib.util
import json
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rungs.common.errors import UserError
from rungs.common.plugins import TRACKERS, load_plugin, plugin_names, unknown_name
from rungs.common.shown_text import install_line
from rungs.run.records import Sample

PROJECT = "rungs"
"""Default project of runs in a tracker, unless its environment variables name another."""
_MLFLOW_ID = "rungs.id"
"""Tag that identifies a resumed run."""
_MLFLOW_METRICS = 1000
"""MLflow's maximum number of metrics per batch."""


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


class TensorBoardTracker:
    """TensorBoard: event files in `trackers/tensorboard/` of the run folder, one for each start."""

    def __init__(self, run: TrackedRun) -> None:
        from tensorboardX import SummaryWriter

        self._last = run.last_step
        self._writer: Any = SummaryWriter(
            logdir=str(run.folder),
            flush_secs=3600,
            # Readers drop an earlier start's events for the steps that this one repeats.
            purge_step=max(self._last + 1, 0),
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


class WandbTracker:
    """Weights & Biases; its own variables, such as WANDB_PROJECT and WANDB_MODE, apply. The run has
    the same id after each resume; offline, a folder of files per start, which `wandb sync` uploads
    as one run."""

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


class TrackioTracker(WandbTracker):
    """Trackio: its local store, or a Space if TRACKIO_SPACE_ID names one. The run is named by its
    name and id. Trackio has the interface of Weights & Biases."""

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


class MlflowTracker:
    """MLflow, at MLFLOW_TRACKING_URI or its default. A run is found again by its id in a tag."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow.tracking import MlflowClient

        logging.getLogger("mlflow").setLevel(logging.WARNING)
        self._client: Any = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        self._run_id, self._last = self._find(experiment, run)
        self._unsent: list[Any] = []

    def _find(self, experiment: str, run: TrackedRun) -> tuple[str, int]:
        [*runs] = self._client.search_runs([experiment], f"tags.`{_MLFLOW_ID}` = '{run.id}'")
        if runs:
            self._client.set_terminated(runs[0].info.run_id, status="RUNNING")
            history = self._client.get_metric_history(runs[0].info.run_id, "tokens_seen")
            return runs[0].info.run_id, max((metric.step for metric in history), default=-1)
        created = self._client.create_run(experiment, run_name=run.name, tags={_MLFLOW_ID: run.id})
        for key, value in run.config.items():
            self._client.log_param(created.info.run_id, key, json.dumps(value)[:6000])
        return created.info.run_id, -1

    def last_step(self) -> int:
        return self._last

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        if len(self._unsent) + len(metrics) > _MLFLOW_METRICS:
            self.flush()
        allowed = {re.sub(r"[^\w\-. /]", "_", name): value for name, value in metrics.items()}
        self._unsent += [Metric(name, value, now, step) for name, value in allowed.items()]

    def log_samples(self, step: int, samples: Sequence[Sample]) -> None:
        text = "\n".join(one.model_dump_json() for one in samples) + "\n"
        self._client.log_text(self._run_id, text, f"samples/step-{step:06d}.jsonl")

    def log_chart(self, path: Path) -> None:
        self._client.log_artifact(self._run_id, str(path), "charts")

    def flush(self) -> None:
        if self._unsent:
            self._client.log_batch(self._run_id, metrics=self._unsent)
            self._unsent = []

    def finish(self, summary: Mapping[str, float]) -> None:
        self.flush()
        self._client.log_dict(self._run_id, dict(summary), "final-figures.json")
        self._client.set_terminated(self._run_id)


BUILT_IN: dict[str, tuple[str, OpenTracker]] = {
    "mlflow": ("mlflow", MlflowTracker),
    "tensorboard": ("tensorboardX", TensorBoardTracker),
    "trackio": ("trackio", TrackioTracker),
    "wandb": ("wandb", WandbTracker),
}
"""The module that a tracker's extra installs, and the function that opens a run."""


def check_trackers(names: Sequence[str], place: str) -> None:
    """Check that trackers exist and are installed. Raises UserError with a line, beginning with
    `place`, for each that does not or is not."""
    if lines := [line for name in names if (line := _problem(name))]:
        raise UserError.at(place, lines)


def _problem(name: str) -> str | None:
    if name in BUILT_IN:
        if importlib.util.find_spec(BUILT_IN[name][0]):
            return None
        return f"{name} is not installed; install it with the extra: {install_line(name)}"
    others = plugin_names(TRACKERS)
    return None if name in others else unknown_name("tracker", name, {*BUILT_IN, *others})


def find_tracker(name: str) -> OpenTracker:
    """Return the function that opens a run in a tracker, after `check_trackers`."""
    if name in BUILT_IN:
        return BUILT_IN[name][1]
    return load_plugin(TRACKERS, name)

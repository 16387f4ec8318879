"""MLflow, at MLFLOW_TRACKING_URI or its own default."""

import json
import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rungs.integrations.trackers import PROJECT, TrackedRun
from rungs.run.records import Sample

_ID = "rungs.id"
"""Tag that identifies a resumed run."""
_METRICS_AT_ONCE = 1000
"""MLflow's maximum number of metrics per batch."""


class MlflowTracker:
    """A run that is found again by its id in a tag."""

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
        [*runs] = self._client.search_runs([experiment], f"tags.`{_ID}` = '{run.id}'")
        if runs:
            self._client.set_terminated(runs[0].info.run_id, status="RUNNING")
            history = self._client.get_metric_history(runs[0].info.run_id, "tokens_seen")
            return runs[0].info.run_id, max((metric.step for metric in history), default=-1)
        created = self._client.create_run(experiment, run_name=run.name, tags={_ID: run.id})
        for key, value in run.config.items():
            self._client.log_param(created.info.run_id, key, json.dumps(value)[:6000])
        return created.info.run_id, -1

    def last_step(self) -> int:
        return self._last

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        if len(self._unsent) + len(metrics) > _METRICS_AT_ONCE:
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


open_tracker = MlflowTracker

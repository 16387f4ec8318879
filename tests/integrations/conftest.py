"""Runs to mirror and to track, mirrors that fail, and trackers that store in a folder."""

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from matplotlib import image

from rungs.run.folder import RunFolder
from tests.support.mirrors import Failing, saved_run
from tests.support.recorded_runs import record_run, step

SAMPLE = {
    "time": "2026-01-01T00:00:00+00:00",
    "step": 10,
    "checkpoint": "c",
    "prompt": "Once",
    "temperature": 0,
    "seed": 0,
    "text": " upon a time",
    "tokens": 3,
    "ended": False,
}


@pytest.fixture
def local_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have each tracker store in `tmp_path / "stores"`, without a network."""
    stores = tmp_path / "stores"
    stores.mkdir()
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(stores))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("TRACKIO_DIR", str(stores / "trackio"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{stores / 'mlflow.db'}")
    monkeypatch.chdir(stores)  # where MLflow puts artifacts
    return stores


@pytest.fixture
def recorded(tmp_path: Path) -> RunFolder:
    """A run of 30 steps with samples, a chart and a score."""
    lineage = {"like": "runs/other", "set": {"learning_rate": 0.01}}
    folder = record_run(tmp_path / "run", map(step, range(30)), lineage=lineage)
    (folder / "samples.jsonl").write_text(json.dumps(SAMPLE) + "\n")
    score = {"time": "", "checkpoint": "c-step-000029", "task": "quiz", "metric": "acc"}
    (folder / "evaluations.jsonl").write_text(json.dumps(score | {"value": 0.5, "items": 4}) + "\n")
    image.imsave(folder / "loss-chart.png", np.zeros((4, 4, 3)))
    return RunFolder(folder)


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A folder that is not there yet, whose name is also a pattern."""
    return tmp_path / "elsewhere" / "mirror[1]"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder with two checkpoints."""
    return saved_run(tmp_path / "run")


@pytest.fixture
def failing(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the mirror through a file system that can be told to fail."""
    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr("rungs.common.helper_process.FIRST_DELAY", 0.01)
    yield f"failing://{mirror}"
    Failing.left = 10**9

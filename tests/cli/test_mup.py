"""`mup.py` on a tiny run: the coordinate check with and without muP, and a sweep that resumes."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from rungs.config.run_config import RunConfig, load_run
from rungs.data.catalog import open_datasets
from rungs.data.tokens.loader import TrainingData
from rungs.planning.mup import measure
from rungs.run.folder import RunFolder
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import MODEL, make_dataset, make_run

pytestmark = pytest.mark.long
WIDE = {**MODEL, "emb_dim": 32, "n_layers": 3}


@pytest.fixture
def datasets(tmp_path: Path) -> Path:
    make_dataset(tmp_path / "datasets")
    return tmp_path / "datasets"


def run_with(folder: Path, base: int | None) -> RunFolder:
    run = make_run(folder, weight_decay=0, drop_rate=0, min_train_tokens=8 * 128)
    mup = {"mup": {"base_emb_dim": base}} if base else {}
    (run.path / "model.json").write_text(json.dumps(WIDE | mup))
    return run


def mup(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "mup.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def stop_in_the_first_run(folder: Path, *arguments: object) -> int:
    """Send SIGTERM to `mup.py` alone once a step is recorded; return its exit code."""
    command = [sys.executable, str(ROOT / "mup.py"), *map(str, arguments)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=ROOT)
    while not any(path.stat().st_size for path in folder.glob("*/*/metrics.jsonl")):
        assert process.poll() is None
        time.sleep(0.02)
    process.terminate()
    return process.wait()


@pytest.mark.parametrize(("base", "code"), [(32, 0), (None, 1)], ids=["muP", "standard"])
def test_the_coordinate_check_passes_in_mup_only(
    base: int | None, code: int, tmp_path: Path, datasets: Path
) -> None:
    run = run_with(tmp_path / "run", base)
    options = ("--widths", "64,128,256", "--steps", 4, "--datasets-dir", datasets)
    done = mup("check", run.path, *options)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("off" in done.stdout) == bool(code)
    assert ("has no key mup" in done.stdout) == bool(code)
    assert (run.path / "coordinate-check.png").stat().st_size > 10_000


def test_a_check_averages_over_seeds(tmp_path: Path, datasets: Path) -> None:
    config = load_run(run_with(tmp_path / "run", 32).path)
    data = TrainingData(config, open_datasets(config.train.datasets, datasets))
    first = measure(config, [32, 64], data, steps=4, seeds=1)
    second = measure(with_seed(config, config.train.seed + 1), [32, 64], data, steps=4, seeds=1)
    both = measure(config, [32, 64], data, steps=4, seeds=2)
    for one, other, mean in zip(first, second, both, strict=True):
        for place, found in mean.changes.items():
            squares = one.changes[place] ** 2, other.changes[place] ** 2
            assert squares[0] != pytest.approx(squares[1], rel=1e-4)
            assert found**2 == pytest.approx(np.mean(squares), rel=1e-5)


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    return RunConfig(config.model, config.train.model_copy(update={"seed": seed}))


def test_a_sweep_trains_what_is_left_and_draws_a_chart(tmp_path: Path, datasets: Path) -> None:
    run = run_with(tmp_path / "run", 32)
    options = ("--widths", "32,64", "--learning-rates", "0.001,0.01", "--datasets-dir", datasets)
    stopped = stop_in_the_first_run(tmp_path / "run-sweep", "sweep", run.path, *options)
    assert stopped == 128 + signal.SIGTERM
    (begun,) = (tmp_path / "run-sweep" / "mup").iterdir()
    assert any((begun / "checkpoints").iterdir())
    first = mup("sweep", run.path, *options)
    assert first.returncode == 0, first.stderr
    folders = sorted(path.name for path in (tmp_path / "run-sweep" / "mup").iterdir())
    assert folders == [f"emb_dim-{w}-rate-{r}" for w in (32, 64) for r in ("0.001", "0.01")]
    assert (tmp_path / "run-sweep" / "learning-rates.png").stat().st_size > 10_000
    assert "4 of 4: muP, emb_dim 64, learning rate 0.01: loss " in first.stderr
    metrics = tmp_path / "run-sweep" / "mup" / folders[0] / "metrics.jsonl"
    before = metrics.read_text()
    assert len(before.splitlines()) == 8
    again = mup("sweep", run.path, *options)
    assert again.stdout == first.stdout
    assert metrics.read_text() == before

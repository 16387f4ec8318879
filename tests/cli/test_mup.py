"""`mup.py` on a tiny run: the coordinate check with and without muP."""

import json
import subprocess
import sys
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


@pytest.mark.parametrize(
    ("base", "widths", "code"),
    [(32, "64,512", 0), (None, "32,128", 1)],  # in muP, the narrowest models are a little off
    ids=["muP", "standard"],
)
def test_the_coordinate_check_passes_in_mup_only(
    base: int | None, widths: str, code: int, tmp_path: Path, datasets: Path
) -> None:
    run = run_with(tmp_path / "run", base)
    options = ("--widths", widths, "--steps", 4, "--seeds", 1, "--datasets-dir", datasets)
    done = mup("check", run.path, *options)
    assert done.returncode == code, done.stdout + done.stderr
    assert ("off" in done.stdout) == bool(code)
    assert ("has no key mup" in done.stdout) == bool(code)
    assert (run.path / "coordinate-check.png").stat().st_size > 10_000


def test_a_check_averages_over_seeds(tmp_path: Path, datasets: Path) -> None:
    config = load_run(run_with(tmp_path / "run", 32).path)
    data = TrainingData(config, open_datasets(config.train.datasets, datasets))
    first = measure(config, [32, 64], data, steps=4, seeds=1)
    assert [*first[0].sizes] == ["embedding", "layer 0", "layer 1", "logits"]
    second = measure(with_seed(config, config.train.seed + 1), [32, 64], data, steps=4, seeds=1)
    both = measure(config, [32, 64], data, steps=4, seeds=2)
    for one, other, mean in zip(first, second, both, strict=True):
        for place, found in mean.changes.items():
            squares = one.changes[place] ** 2, other.changes[place] ** 2
            assert squares[0] != pytest.approx(squares[1], rel=1e-4)
            assert found**2 == pytest.approx(np.mean(squares), rel=1e-5)


def with_seed(config: RunConfig, seed: int) -> RunConfig:
    return RunConfig(config.model, config.train.model_copy(update={"seed": seed}))

"""Grids of runs."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rungs.cli.grid import cells
from rungs.common.errors import UserError
from rungs.run import metrics
from rungs.run.folder import RunFolder
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import make_dataset, make_run


def test_each_combination_is_a_run(tmp_path: Path) -> None:
    base = str(make_run(tmp_path / "base").path)
    found = cells(base, ["learning_rate=1e-3,3e-3", "seed=0,1"], ["drop_rate=0"], tmp_path / "lr")
    assert [cell.folder.name for cell in found] == [
        "learning_rate=0.001,seed=0",
        "learning_rate=0.001,seed=1",
        "learning_rate=0.003,seed=0",
        "learning_rate=0.003,seed=1",
    ]
    assert found[1].changes == {"drop_rate": 0, "learning_rate": 0.001, "seed": 1}
    assert not (tmp_path / "lr").exists()


def test_values_are_json_or_words(tmp_path: Path) -> None:
    base = str(make_run(tmp_path / "base").path)
    found = cells(base, ["optimizer=adamw,lion", "qkv_bias=true,false"], [], tmp_path / "x")
    assert [cell.folder.name for cell in found][:2] == [
        "optimizer=adamw,qkv_bias=true",
        "optimizer=adamw,qkv_bias=false",
    ]


@pytest.mark.parametrize(
    ("grid", "settings", "line"),
    [
        (["learning_rate"], [], "must have the form key=value,value"),
        (["learning_rate="], [], "must have the form"),
        (["learning_rate=1,1"], [], "a value is there twice"),
        (["seed=1", "seed=2"], [], "given twice"),
        (['dataset={"a":1,"a":2}'], [], "--grid dataset=.*: a: given more than once"),
        (["seed=1"], ["seed=2"], "--grid and --set: both change seed"),
        (["learnig_rate=1"], [], "did you mean"),
        (["learning_rate=0.1,-1"], [], "learning_rate"),
        (["tokenizer=a/b,a-b"], [], "2 runs would be .*tokenizer=a-b"),
        (["seed=" + ",".join(map(str, range(1001)))], [], "more than 1,000"),
    ],
)
def test_wrong_grids_are_refused(
    grid: list[str], settings: list[str], line: str, tmp_path: Path
) -> None:
    base = str(make_run(tmp_path / "base").path)
    with pytest.raises(UserError, match=line):
        cells(base, grid, settings, tmp_path / "into")
    assert not (tmp_path / "into").exists()


@pytest.mark.long
def test_a_grid_that_is_killed_goes_on(tmp_path: Path) -> None:
    make_dataset(tmp_path / "datasets")
    base, into = make_run(tmp_path / "base"), tmp_path / "grid"
    command = [sys.executable, str(ROOT / "train.py"), "--like", str(base.path)]
    command += ["--grid", "learning_rate=0.001,0.01", "--grid", "seed=0,1", "--into", str(into)]
    command += ["--datasets-dir", str(tmp_path / "datasets")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    second = RunFolder(into / "learning_rate=0.001,seed=1")
    while not second.metrics.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    runs = [RunFolder(path) for path in sorted(into.glob("learning_rate*"))]
    assert [len(metrics.read(run.metrics)) for run in runs] == [24] * 4
    assert "learning_rate=0.01,seed=1" in result.stdout
    assert (into / "compare.html").is_file()
    assert (into / "comparison" / "loss-by-step-chart.png").is_file()
    assert not base.metrics.exists()

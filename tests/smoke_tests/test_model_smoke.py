"""The model check as a command: output, exit codes, and that it writes nothing."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.committed_runs import ROOT
from tests.support.tiny_run import MODEL, make_dataset, make_run

SCRIPT = ROOT / "smoke_tests" / "test_model.py"
STOP_THE_OPTIMIZER = f"""
import runpy
from rungs.optim import multi_steps

multi_steps.learning_rate_schedule = lambda *_: lambda _: 0.0
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def arguments(tmp_path: Path) -> list[Path | str]:
    """A run without layers, which compiles in seconds, and its dataset."""
    make_dataset(tmp_path / "datasets")
    folder = make_run(tmp_path / "run").path
    (folder / "model.json").write_text(json.dumps(MODEL | {"n_layers": 0}))
    return [folder, "--datasets-dir", tmp_path / "datasets"]


def test_a_sound_run_passes(arguments: list[Path | str]) -> None:
    result = run(SCRIPT, *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the first 4 sequences, 16 of their 16 tokens" in result.stdout
    assert result.stdout.count(" ok ") == 8
    assert result.stdout.endswith("failed: none\n")
    assert {path.name for path in Path(arguments[0]).iterdir()} == {"model.json", "train.json"}


def test_failed_checks_are_named(arguments: list[Path | str]) -> None:
    result = run("-c", STOP_THE_OPTIMIZER, *arguments, "--steps", "20")
    assert result.returncode == 1, result.stdout + result.stderr
    assert "\noverfitting    FAILED  4." in result.stdout
    assert result.stdout.endswith("failed: overfitting\n")


def test_errors_are_one_line(arguments: list[Path | str]) -> None:
    other = make_run(Path(arguments[0]).parent / "other", dataset="absent")
    for bad in ("no-such-run", other.path):
        result = run(SCRIPT, bad, *arguments[1:])
        assert result.returncode == 2
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1

"""`smoke_tests/test_resume.py` passes if a resumed run loses nothing, and names what is lost."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rungs.checks.check import failures
from rungs.checks.resume import ResumeCheck, shorten
from rungs.config import run_config
from rungs.run.folder import RunFolder
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import MODEL, make_dataset, make_pairs, make_run

SCRIPT = ROOT / "smoke_tests" / "test_resume.py"
TRAIN_SCRIPT = SCRIPT.with_name("train_with_batch_log.py")
FAULTY_TRAIN = """
import runpy
from tests.faults import injected_faults
injected_faults.{fault}()
runpy.run_path({script!r}, run_name="__main__")
"""
MIXTURE = {"tiny": 2, "pairs": 1}
SHARDING = {"mode": "fsdp", "data": 2}
EXPERTS = {"n_experts": 4, "experts_per_token": 2}
EPOCHS = {"epochs": 3, "shuffle": True, "validation_tokens": 64}


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    make_pairs(folder, count=400)
    return folder


def smoke(run: RunFolder, datasets_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, run.path, "--datasets-dir", datasets_dir, *options]
    return subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)


@pytest.mark.long
def test_a_run_that_loses_nothing_passes(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **EPOCHS, dataset=MIXTURE, sharding=SHARDING)
    (run.path / "model.json").write_text(json.dumps(MODEL | EXPERTS))
    result = smoke(run, datasets_dir, "--keep", str(tmp_path / "kept"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "14 steps of 128 tokens, a checkpoint every 3" in result.stdout
    kills = re.findall(r"^killed after \d+\.\d\d s, (\d+) steps? into", result.stdout, re.MULTILINE)
    assert len(kills) == 3
    assert re.findall(r"identical|DIFFERS", result.stdout) == ["identical"] * 4
    assert {path.name for path in run.path.iterdir()} == {"model.json", "train.json"}
    assert (tmp_path / "kept" / "killed" / "checkpoints" / "latest").exists()


@pytest.fixture(scope="module")
def resume_check(datasets_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> ResumeCheck:
    """The check of a run, which has been trained without a kill."""
    folder = tmp_path_factory.mktemp("resume_check")
    run = make_run(folder / "run", **EPOCHS)
    configs = run_config.load_run(run.path)
    short = shorten(run, configs, datasets_dir, tokens=16)
    command = [sys.executable, str(TRAIN_SCRIPT)]
    check = ResumeCheck(folder / "short", short, command)
    check.train_uninterrupted()
    return check


@pytest.mark.long
@pytest.mark.parametrize(
    ("fault", "what", "difference"),
    [
        ("reset_first_moments", "optimizer state", r".*\.mu\..*\]: \S+ uninterrupted, \S+ killed"),
        ("skip_a_batch", "data order", r"step (\d+): process [2-9] .* the batch of step \d+"),
    ],
)
def test_what_a_resumed_process_does_wrong_is_reported(
    fault: str,
    what: str,
    difference: str,
    resume_check: ResumeCheck,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = FAULTY_TRAIN.format(script=str(TRAIN_SCRIPT), fault=fault)
    monkeypatch.setattr(resume_check, "_train_command", [sys.executable, "-c", code])
    assert len(list(resume_check.train_killed(1))) == 1
    found = {check.name: check.notes[0] for check in failures(resume_check.comparisons())}
    assert re.match(difference, found.pop(what, "none")), found

"""`checkpointing.py` lists a run's checkpoints and exits with 1 if one is damaged."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import rungs
from rungs.run.folder import RunFolder
from tests.support.commands import Finished, run_script
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import make_run
from tests.support.written_checkpoints import (
    NEW,
    OLD,
    flip_byte,
    write_checkpoints,
    write_model,
)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = make_run(tmp_path / "run")
    write_checkpoints(run.checkpoints)
    return run


def invoke(run: RunFolder, *options: str) -> Finished:
    return run_script("checkpointing.py", run.path, *options)


def states(result: Finished) -> dict[str, str]:
    """Return the state of each checkpoint, by its name at the end of the line."""
    rows = [line.split() for line in result.stdout.splitlines()]
    return {row[-1]: row[-2] for row in rows if row[-1] in (OLD, NEW)}


def test_valid_checkpoints_are_listed(run: RunFolder) -> None:
    result = invoke(run)
    assert result.returncode == 0, result.stderr
    header, old, new = result.stdout.splitlines()
    assert header.split()[:3] == ["step", "train", "loss"]
    assert old.split()[:3] == ["1", "3.0000", "2.0000"]
    assert old.split()[-6:] == ["MB", "2026-01-01", "00:00:00", "best", "complete", OLD]
    assert new.split()[:3] == ["2", "3.5000", "2.5000"]
    assert new.split()[-6:] == ["MB", "2026-01-02", "00:00:00", "latest", "complete", NEW]
    assert states(invoke(run, "--verify")) == {OLD: "verified", NEW: "verified"}


def test_a_flipped_byte_is_found_with_verify_only(run: RunFolder) -> None:
    flip_byte(run.checkpoints / OLD / "model.safetensors")
    assert invoke(run).returncode == 0
    result = invoke(run, "--verify")
    assert result.returncode == 1
    assert states(result) == {OLD: "damaged", NEW: "verified"}
    assert f"{OLD}: damaged: model.safetensors" in result.stdout.splitlines()


@pytest.mark.parametrize("name", ["model.safetensors", "meta.json"])
def test_a_missing_file_is_found_without_verify(name: str, run: RunFolder) -> None:
    (run.checkpoints / NEW / name).unlink()
    result = invoke(run)
    assert result.returncode == 1
    assert states(result) == {OLD: "complete", NEW: "damaged"}
    assert result.stdout.splitlines()[-1] == f"{NEW}: damaged: {name}"


def test_json_has_the_same_content_and_exit_code(run: RunFolder) -> None:
    old, new = json.loads(invoke(run, "--json").stdout)
    assert (old["name"], old["step"], old["links"], old["damage"]) == (OLD, 1, ["best"], [])
    assert (new["name"], new["validation_loss"], new["links"]) == (NEW, 2.5, ["latest"])
    flip_byte(run.checkpoints / NEW / "optimizer" / "state" / "manifest.ocdbt")
    result = invoke(run, "--json", "--verify")
    assert result.returncode == 1
    assert [c["damage"] for c in json.loads(result.stdout)] == [
        [],
        ["optimizer/state/manifest.ocdbt"],
    ]


def test_imported_weights_are_listed_without_checksums(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    write_model(run.imported)
    result = invoke(run, "--verify")
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1].split()[-3:] == ["no", "checksums", "imported"]


def test_a_run_without_checkpoints_is_refused(tmp_path: Path) -> None:
    result = invoke(make_run(tmp_path / "run"))
    assert result.returncode == 2
    assert "run: no checkpoint yet; train it: uv run train.py" in result.stderr


def test_listing_does_not_load_jax_and_the_script_has_load_model() -> None:
    code = "import sys, checkpointing; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert importlib.import_module("checkpointing").load_model is rungs.load_model

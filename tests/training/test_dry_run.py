"""`--dry-run` and the options of the log."""

import json
import os
from pathlib import Path

import pytest

from rungs.config.run_config import load_run
from rungs.run.folder import StartOptions
from rungs.training.dataset_learner import on_datasets
from rungs.training.start import launch
from tests.support.tiny_run import make_dataset, make_run, train

pytestmark = pytest.mark.usefixtures("no_charts")


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.long
def test_it_takes_a_step_and_writes_nothing(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    before = contents(tmp_path)
    result = train(run, datasets_dir, "--dry-run")
    assert result.returncode == 0, result.stderr
    assert contents(tmp_path) == before
    assert "24 steps are left" in result.stderr
    assert launch(run, load_run(run.path), StartOptions(), on_datasets(datasets_dir)) == 0
    loss = json.loads(run.metrics.read_text().splitlines()[0])["train_loss"]
    assert f"the first step has loss {loss:.4f}" in result.stderr


@pytest.mark.long
def test_a_copy_is_not_kept(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    copy = type(run)(tmp_path / "copy")
    result = train(copy, datasets_dir, "--like", str(run.path), "--dry-run")
    assert result.returncode == 0, result.stderr
    assert not copy.path.exists()


def test_what_is_wrong_is_found(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", dataset="absent/nowhere")
    assert (
        train(run, datasets_dir, "--dry-run", env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode
        == 2
    )


@pytest.mark.long
def test_quiet_prints_only_warnings(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", min_train_tokens=128)
    result = train(run, datasets_dir, "--quiet")
    assert (result.returncode, result.stderr) == (0, "")
    assert "finished after step 0" in run.log.read_text()


@pytest.mark.long
def test_messages_as_json(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", min_train_tokens=128)
    result = train(run, datasets_dir, "--json-log")
    lines = [json.loads(line) for line in result.stderr.splitlines()]
    assert {"time", "level", "message"} == set(lines[0])
    messages = [line["message"] for line in lines]
    if messages[-1].startswith("drawing the charts"):  # the wait for it is long on a busy machine
        messages.pop()
    assert messages[-1].startswith("finished after step 0")
    assert "INFO finished" in run.log.read_text()

"""A run that resumes in another folder, from an archive, or with a wrong clock."""

import shutil
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rungs.run.folder import RunFolder
from tests.faults.short_runs import checkpoint_steps, short_run, train_here, train_with_fault
from tests.support.committed_runs import ROOT
from tests.support.tiny_run import (
    assert_same_outcome,
    last_checkpoint,
    make_run,
    train,
)

MORE_STEPS = {"min_train_tokens": 60 * 128}


@pytest.mark.long
def test_a_run_resumes_wherever_and_whenever(datasets_dir: Path, tmp_path: Path) -> None:
    uninterrupted = make_run(tmp_path / "uninterrupted", **MORE_STEPS)
    assert train(uninterrupted, datasets_dir).returncode == 0

    run = make_run(tmp_path / "first", **MORE_STEPS)
    kill("kill_at:between write and rename:4", run, datasets_dir)
    run = zip_and_unzip(run, tmp_path / "second")
    replace_links_by_text_files(run)
    kill("set_clock_back:86400:before meta.json:3", run, datasets_dir, TZ="Pacific/Auckland")
    assert last_checkpoint(run).step == 20
    shutil.copytree(run.path, tmp_path / "third", ignore=shutil.ignore_patterns("best", "latest"))
    run = RunFolder(tmp_path / "third")
    kill("set_clock_back:172800:while links change:5", run, datasets_dir, TZ="America/Lima")
    run = RunFolder(run.path.rename(tmp_path / "fourth"))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    finished = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "../fourth", "--datasets-dir", str(datasets_dir)],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    assert_same_outcome(run, uninterrupted)
    assert " WARNING " not in run.log.read_text()
    assert not run.aside.exists()
    assert (run.checkpoints / "latest").readlink() == Path(last_checkpoint(run).folder.name)
    assert [path.name for path in elsewhere.iterdir()] == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["lr[1e-3]", "a\\b", "a**b?"])
@pytest.mark.usefixtures("no_charts")
def test_a_run_at_any_path(
    name: str, uninterrupted: RunFolder, datasets_dir: Path, tmp_path: Path
) -> None:
    run = short_run(tmp_path / name)
    assert train_here(run, datasets_dir) == 0
    assert checkpoint_steps(run) == [0, 3, 6, 7]
    assert train_here(run, datasets_dir, rewind_to="step-000003") == 0
    assert_same_outcome(run, uninterrupted)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def kill(fault: str, run: RunFolder, datasets_dir: Path, **environment: str) -> None:
    """Train until the fault kills the process."""
    killed = train_with_fault(fault, run, datasets_dir, **environment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr


def zip_and_unzip(run: RunFolder, place: Path) -> RunFolder:
    """Return the run out of an archive of its files, which has no links and empty folders."""
    archive = place.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as file:
        for path in run.path.rglob("*"):
            if path.is_file() and not any(above.is_symlink() for above in path.parents):
                file.write(path, path.relative_to(run.path))
    with zipfile.ZipFile(archive) as file:
        file.extractall(place)
    return RunFolder(place)


def replace_links_by_text_files(run: RunFolder) -> None:
    """As a system without symlinks has them."""
    for name in ("best", "latest"):
        (run.checkpoints / name).write_text(last_checkpoint(run).folder.name + "\n")

"""Token files that change while they are read: a line that names the file, the model saved, and the
same end once the file is what it was."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import RunFailure, UserError
from rungs.data import token_file
from rungs.data.dataset import Dataset, read_description
from rungs.run.folder import RunFolder
from rungs.run.metrics import MetricsLog
from tests.faults.fault_runs import (
    NoDrawer,
    error_line,
    failure,
    faulty,
    go,
    short_run,
    whole_steps,
)
from tests.faults.storage_faults import before_call, fail
from tests.support.tiny_run import assert_same_outcome

pytest_plugins = ["fault_fixtures"]

LONGER = {"epochs": 2, "checkpoint_interval": 100}


@pytest.fixture
def copied_datasets(datasets_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(datasets_dir, tmp_path / "datasets"))


def cut(file: Path) -> None:
    os.truncate(file, 300)


def overwrite(file: Path) -> None:
    """Other tokens of the same number, in place."""
    with file.open("r+b") as opened:
        opened.seek(1000)
        opened.write(bytes(30_000))


def put_back(file: Path, datasets_dir: Path) -> None:
    shutil.copyfile(datasets_dir / "tiny" / file.name, file)


@pytest.fixture(scope="module")
def straight_longer(tmp_path_factory: pytest.TempPathFactory, datasets_dir: Path) -> RunFolder:
    """A run of twice as many steps, more than are read ahead, that nothing interrupted."""
    run = short_run(tmp_path_factory.mktemp("longer") / "straight", **LONGER)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rungs.training.start.ChartDrawer", NoDrawer)
        assert go(run, datasets_dir) == 0
    return run


@pytest.mark.long
def test_a_file_that_is_cut_does_not_kill_the_process(
    copied_datasets: Path, tmp_path: Path
) -> None:
    run = short_run(tmp_path / "run", **LONGER)
    file = copied_datasets / "tiny" / "train.safetensors"
    line = error_line(faulty(f"storage_faults.cut_at_step:1:{file}:300", run, copied_datasets))
    assert line.startswith(f"{file}: was changed while it was in use (had 40,")
    assert "bring back what it was, then run the same command" in line
    assert whole_steps(run)[-1] > 1
    with pytest.raises(UserError, match=r"train\.safetensors: not a whole safetensors file"):
        go(run, copied_datasets)


@pytest.mark.parametrize("change", [cut, overwrite])
@pytest.mark.usefixtures("no_charts")
def test_the_model_is_saved_when_its_data_fails(
    change: Callable[[Path], None],
    straight_longer: RunFolder,
    datasets_dir: Path,
    copied_datasets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = short_run(tmp_path / "run", **LONGER)
    file = copied_datasets / "tiny" / "train.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "append", MetricsLog.append)
        before_call(MetricsLog, "append", 3, lambda *_: change(file))
        assert f"{file}: was changed while it was in use" in failure(run, copied_datasets)
    steps = whole_steps(run)
    assert len(steps) == 2
    assert 2 <= steps[-1] < 15
    assert len(run.metrics.read_text().splitlines()) == steps[-1] + 1
    if change is overwrite:
        with pytest.raises(UserError, match="its training tokens are not those this run was start"):
            go(run, copied_datasets)
    put_back(file, datasets_dir)
    assert go(run, copied_datasets) == 0
    assert_same_outcome(run, straight_longer)


@pytest.mark.usefixtures("no_charts")
def test_validation_tokens_that_change(
    straight: RunFolder,
    datasets_dir: Path,
    copied_datasets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = short_run(tmp_path / "run")
    file = copied_datasets / "tiny" / "validation.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "append", MetricsLog.append)
        before_call(MetricsLog, "append", 5, lambda *_: cut(file))
        assert failure(run, copied_datasets).startswith(f"{file}: was changed while it was in use")
    assert whole_steps(run) == [0, 3]
    put_back(file, datasets_dir)
    assert go(run, copied_datasets) == 0
    assert_same_outcome(run, straight)


@pytest.mark.usefixtures("no_charts")
def test_a_disk_that_cannot_be_read(
    tmp_path: Path, datasets_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def break_disk(*_: Any) -> None:
        monkeypatch.setattr(os, "pread", lambda *_: fail(errno.EIO))

    run = short_run(tmp_path / "run", **LONGER)
    monkeypatch.setattr(MetricsLog, "append", MetricsLog.append)
    before_call(MetricsLog, "append", 3, break_disk)
    message = failure(run, datasets_dir)
    file = datasets_dir / "tiny" / "train.safetensors"
    assert message == f"{file}: cannot be read: Input/output error"
    assert 2 <= whole_steps(run)[-1] < 15


def write_tokens(path: Path, *ids: int) -> None:
    with token_file.TokenWriter(path, "U16") as writer:
        writer.append(ids)


def test_slices_of_a_file_that_changes(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    write_tokens(path, *range(100))
    tokens = token_file.open_tokens(path)
    os.utime(path, ns=(0, 0))
    with pytest.raises(RunFailure, match="was changed while it was in use"):
        tokens[3:5]
    tokens = token_file.open_tokens(path)
    path.unlink()
    np.testing.assert_array_equal(tokens[3:5], [3, 4])


def test_reading_without_pread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pread")
    write_tokens(tmp_path / "train.safetensors", *range(100))
    tokens = token_file.open_tokens(tmp_path / "train.safetensors")
    np.testing.assert_array_equal(tokens[3:5], [3, 4])
    np.testing.assert_array_equal(tokens[:], np.arange(100))


def test_a_file_that_was_written_after_its_description_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    write_tokens(path, 1, 2, 3)
    first = Dataset("x", tmp_path).description
    write_tokens(path, 1, 2, 4)
    after = (tmp_path / "dataset.json").stat().st_mtime_ns + 10_000_000
    os.utime(path, ns=(after, after))
    second = Dataset("x", tmp_path).description
    assert second.splits["train"].sha256 != first.splits["train"].sha256
    assert second.splits["train"].largest_token_id == 4
    assert read_description(tmp_path) == second


def test_a_file_that_is_older_than_its_description_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens(tmp_path / "train.safetensors", 1, 2, 3)
    Dataset("x", tmp_path)

    def read(*_: Any) -> None:
        raise AssertionError("read once more")

    monkeypatch.setattr("rungs.data.dataset._read_through", read)
    assert Dataset("x", tmp_path).description.splits["train"].tokens == 3

"""Token files that change during training.

The file is named in one line and the model is saved. Once the file is restored, the run ends as if
nothing had happened.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import RunFailure, UserError
from rungs.data.tokens import token_file
from rungs.data.tokens.dataset import Dataset, read_description
from rungs.run.folder import RunFolder
from rungs.run.metrics import MetricsLog
from tests.faults.injected_faults import act_at_call
from tests.faults.short_runs import (
    checkpoint_steps,
    error_line,
    failure_message,
    short_run,
    train_here,
    train_with_fault,
)
from tests.support.tiny_run import assert_same_outcome

LONGER = {"epochs": 2, "checkpoint_interval": 100}


@pytest.fixture
def copied_datasets(datasets_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(datasets_dir, tmp_path / "datasets"))


def overwrite(file: Path) -> None:
    """Write other tokens in place, as many as before."""
    with file.open("r+b") as opened:
        opened.seek(1000)
        opened.write(bytes(30_000))


def restore(file: Path, datasets_dir: Path) -> None:
    shutil.copyfile(datasets_dir / "tiny" / file.name, file)


@pytest.fixture(scope="module")
def uninterrupted_longer(tmp_path_factory: pytest.TempPathFactory, datasets_dir: Path) -> RunFolder:
    """A run of twice as many steps, more than are prefetched."""
    run = short_run(tmp_path_factory.mktemp("longer") / "uninterrupted", **LONGER)
    assert train_here(run, datasets_dir) == 0
    return run


@pytest.mark.long
def test_a_truncated_file_does_not_crash_the_process(copied_datasets: Path, tmp_path: Path) -> None:
    run = short_run(tmp_path / "run", **LONGER)
    file = copied_datasets / "tiny" / "train.safetensors"
    line = error_line(train_with_fault(f"truncate_at_step:1:{file}:300", run, copied_datasets))
    assert line.startswith(f"{file}: was changed while it was in use (had 40,")
    assert "restore it, then run the same command" in line
    assert checkpoint_steps(run)[-1] > 1
    with pytest.raises(UserError, match=r"train\.safetensors: not a complete safetensors file"):
        train_here(run, copied_datasets)


@pytest.mark.long
def test_the_model_is_saved_when_its_training_data_changes(
    uninterrupted_longer: RunFolder,
    datasets_dir: Path,
    copied_datasets: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = short_run(tmp_path / "run", **LONGER)
    file = copied_datasets / "tiny" / "train.safetensors"
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "append", MetricsLog.append)
        act_at_call(MetricsLog, "append", 3, lambda *_: overwrite(file))
        assert f"{file}: was changed while it was in use" in failure_message(run, copied_datasets)
    steps = checkpoint_steps(run)
    assert len(steps) == 2
    assert 2 <= steps[-1] < 15
    assert len(run.metrics.read_text().splitlines()) == steps[-1] + 1
    with pytest.raises(UserError, match="its training tokens are not those this run was start"):
        train_here(run, copied_datasets)
    restore(file, datasets_dir)
    assert train_here(run, copied_datasets) == 0
    assert_same_outcome(run, uninterrupted_longer)


def write_tokens(path: Path, *ids: int) -> None:
    with token_file.TokenWriter(path, "U16") as writer:
        writer.append(ids)


def test_a_changed_file_is_noticed_and_a_deleted_one_still_read(tmp_path: Path) -> None:
    path = tmp_path / "train.safetensors"
    write_tokens(path, *range(100))
    tokens = token_file.TokenFile(path).tokens
    os.utime(path, ns=(0, 0))
    with pytest.raises(RunFailure, match="was changed while it was in use"):
        tokens[3:5]
    tokens = token_file.TokenFile(path).tokens
    path.unlink()
    np.testing.assert_array_equal(tokens[3:5], [3, 4])


def test_a_file_newer_than_its_description_is_described_again(tmp_path: Path) -> None:
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


def overwrite_unnoticed(path: Path, *ids: int) -> None:
    """Write other tokens, as many as before, and keep the time of the last change."""
    before = path.stat()
    write_tokens(path, *ids)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize("count", [3, 30_000])
def test_a_file_with_the_size_and_time_of_the_old_one_is_described_again(
    count: int, tmp_path: Path
) -> None:
    path = tmp_path / "train.safetensors"
    write_tokens(path, *range(10, 10 + count))
    first = Dataset("x", tmp_path).description
    overwrite_unnoticed(path, *range(9, 9 + count))
    second = Dataset("x", tmp_path).description
    assert second.splits["train"].sha256 != first.splits["train"].sha256
    assert read_description(tmp_path) == second


def test_a_file_older_than_its_description_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokens(tmp_path / "train.safetensors", 1, 2, 3)
    Dataset("x", tmp_path)

    def read(*_: Any) -> None:
        raise AssertionError("was read again")

    monkeypatch.setattr("rungs.data.tokens.dataset._largest_id_and_checksum", read)
    assert Dataset("x", tmp_path).description.splits["train"].tokens == 3

"""layers.npy: rows survive kills, and any NumPy reads it."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.run import layer_record


def row(step: int, layers: int = 3) -> layer_record.Rows:
    rng = np.random.default_rng(step)
    statistics: dict[str, Any] = {
        "arrays": {"query.kernel": {"weight_rms": rng.normal(size=layers)}},
        "heads": {"entropy": rng.normal(size=(layers, 2))},
    }
    return layer_record.row_of(step, statistics)


def written(path: Path, steps: int) -> Path:
    for step in range(steps):
        layer_record.append(path, row(step))
    return path


def test_numpy_reads_each_row_that_was_added(tmp_path: Path) -> None:
    path = written(tmp_path / "layers.npy", 12)
    for rows in (np.load(path), layer_record.read(path)):
        assert rows is not None
        assert rows["step"].tolist() == list(range(12))
        expected = np.random.default_rng(11).normal(size=3).astype(np.float32)
        np.testing.assert_array_equal(rows["arrays"]["query.kernel"]["weight_rms"][11], expected)
        assert rows["heads"]["entropy"].shape == (12, 3, 2)


@pytest.mark.parametrize("lost", [1, 20, 43])
def test_a_row_that_a_kill_tore_is_written_again(tmp_path: Path, lost: int) -> None:
    path, whole = tmp_path / "layers.npy", written(tmp_path / "whole.npy", 3).read_bytes()
    # the header still has the number of rows before
    two = written(tmp_path / "two.npy", 2).read_bytes()
    path.write_bytes(two[: len(whole) - 3 * row(0).nbytes] + whole[len(two) - 2 * row(0).nbytes :])
    path.write_bytes(path.read_bytes()[:-lost])
    assert len(np.load(path)) == 2
    rows = layer_record.read(path)
    assert rows is not None
    assert rows["step"].tolist() == [0, 1]
    layer_record.append(path, row(2))
    assert path.read_bytes() == whole


def test_rows_after_a_step_are_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "layers.npy", 11)
    layer_record.drop_after(path, 1)
    assert path.read_bytes() == written(tmp_path / "two.npy", 2).read_bytes()
    layer_record.drop_after(path, -1)
    assert not path.exists()
    layer_record.drop_after(path, -1)


def test_a_file_with_other_fields_is_kept_under_another_name(tmp_path: Path) -> None:
    path = written(tmp_path / "layers.npy", 2)
    before = path.read_bytes()
    layer_record.append(path, row(5, layers=4))
    assert (tmp_path / "layers-before-step-5.npy").read_bytes() == before
    assert len(np.load(path)) == 1


@pytest.mark.parametrize(
    "content",
    [b"", b"\x93NUMPY\x02\x00", b"text", b"\x93NUMPY\x01\x00v\x00" + b"{" * 118, b"\x00" * 99],
)
def test_another_file_is_no_record(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "layers.npy"
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        assert layer_record.read(path) is None
        layer_record.drop_after(path, 7)
        layer_record.append(path, row(8))
    assert caplog.messages[:2] == [f"{path}: damaged, or not a record of layers"] * 2
    assert (tmp_path / "layers-before-step-8.npy").read_bytes() == content
    assert len(np.load(path)) == 1


def test_the_rows_up_to_a_step_are_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "layers.npy", 5)
    assert layer_record.up_to(path, 1) == written(tmp_path / "two.npy", 2).read_bytes()
    assert layer_record.up_to(path, -1) == b""
    assert layer_record.up_to(tmp_path / "none.npy", 9) == b""
    assert len(np.load(path)) == 5


def test_a_last_row_of_zeros_is_dropped(tmp_path: Path) -> None:
    """A power cut may lose a row that the header doesn't count yet."""
    path = written(tmp_path / "layers.npy", 3)
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(row(0).nbytes))
    layer_record.drop_after(path, 9)
    assert path.read_bytes() == whole

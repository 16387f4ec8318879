"""layers.npy: rows survive kills, and any NumPy reads it."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import RunFailure
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
    before = path.stat().st_ino
    layer_record.drop_after(path, 5)
    assert path.stat().st_ino == before
    layer_record.drop_after(path, -1)
    assert not path.exists()
    layer_record.drop_after(path, -1)


def test_a_file_with_other_fields_is_kept_under_another_name(tmp_path: Path) -> None:
    path = written(tmp_path / "layers.npy", 2)
    before = path.read_bytes()
    layer_record.append(path, row(5, layers=4))
    assert (tmp_path / "layers-before-step-5.npy").read_bytes() == before
    assert len(np.load(path)) == 1
    path.write_bytes(b"damaged")
    layer_record.append(path, row(5))
    assert (tmp_path / "layers-before-step-5.npy").read_bytes() == before
    assert (tmp_path / "layers-before-step-5-again.npy").read_bytes() == b"damaged"


@pytest.mark.parametrize(
    "content",
    [b"", b"\x93NUMPY\x02\x00", b"text", b"\x93NUMPY\x01\x00v\x00" + b"{" * 118, b"\x00" * 99],
)
def test_another_file_is_no_record(
    tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    path, aside = tmp_path / "layers.npy", tmp_path / "layers-before-step-8.npy"
    path.write_bytes(content)
    damaged = f"{path}: damaged, or not a record of layers"
    with caplog.at_level(logging.WARNING):
        assert layer_record.read(path) is None
        assert layer_record.up_to(path, 7) == b""
        assert path.read_bytes() == content
        layer_record.drop_after(path, 7)
    assert caplog.messages == [damaged, damaged, f"{damaged}; renamed to {aside.name}"]
    assert aside.read_bytes() == content
    assert not path.exists()


def test_a_file_that_lost_rows_is_told_of_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "layers.npy", 5)
    path.write_bytes(path.read_bytes()[: -2 * row(0).nbytes - 9])
    with caplog.at_level(logging.WARNING):
        layer_record.drop_after(path, 3)
    [message] = caplog.messages
    assert message.startswith(f"{path}: cut off: has 2 of its 5 looks; renamed to ")
    assert path.read_bytes() == written(tmp_path / "two.npy", 2).read_bytes()


def test_the_rows_up_to_a_step_are_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "layers.npy", 5)
    assert layer_record.up_to(path, 1) == written(tmp_path / "two.npy", 2).read_bytes()
    assert layer_record.up_to(path, -1) == b""
    assert layer_record.up_to(tmp_path / "none.npy", 9) == b""
    assert len(np.load(path)) == 5


@pytest.mark.parametrize(
    "dtype",
    [
        [("step", "<f8")],
        [("step", "<i8", 2)],
        [("x", "<f4")],
        [("step", "<i8"), ("heads", "<f8")],
        [("step", "<i8"), ("heads", [("entropy", "<U3")])],
    ],
)
def test_other_fields_are_no_record(tmp_path: Path, dtype: Any) -> None:
    path = tmp_path / "layers.npy"
    path.write_bytes(layer_record._as_bytes(np.zeros(3, dtype)))
    assert layer_record.read(path) is None


def test_any_damage_leaves_a_record_or_none(tmp_path: Path) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "layers.npy"
    whole = written(path, 4).read_bytes()
    for _ in range(2000):
        damaged = bytearray(whole[: rng.integers(len(whole) + 1)])
        for place in rng.integers(0, 400, rng.integers(0, 4)):
            if place < len(damaged):
                damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        rows = layer_record.read(path)
        assert rows is None or rows["step"].dtype == np.int64


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "layers.npy"
    np.save(path, np.array([(0, None)], [("step", "<i8"), ("x", "O")]), allow_pickle=True)
    assert layer_record.read(path) is None


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    target = written(tmp_path / "target.npy", 1)
    before = target.read_bytes()
    (tmp_path / "layers.npy").symlink_to(target)
    with pytest.raises(RunFailure, match="layers of step 7 could not be written: it is a link"):
        layer_record.append(tmp_path / "layers.npy", row(7))
    assert target.read_bytes() == before


@pytest.mark.parametrize("what", ["a smaller row", "a larger row", "a step", "a negative step"])
def test_a_changed_layout_or_step_is_noticed_and_nothing_is_lost(
    what: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "layers.npy", 6)
    content = path.read_bytes()
    start = len(content) - 6 * row(0).nbytes
    if what.endswith("row"):
        shape = b"(2, 2)" if what == "a smaller row" else b"(9, 2)"
        damaged = content.replace(b"(3, 2)", shape)
    else:
        changed = bytearray(content)
        changed[start + 3 * row(0).nbytes + 7] ^= 128 if what == "a negative step" else 1
        damaged = bytes(changed)
    assert damaged != content
    path.write_bytes(damaged)
    assert layer_record.read(path) is None
    layer_record.drop_after(path, 4)
    assert (tmp_path / "layers-before-step-5.npy").read_bytes() == damaged
    assert not path.exists()
    assert "damaged: its steps don't ascend; renamed to" in caplog.text


def test_what_is_left_of_a_record_goes_on_beside_the_one_that_was_cut_off(tmp_path: Path) -> None:
    path = written(tmp_path / "layers.npy", 6)
    path.write_bytes(path.read_bytes()[: -2 * row(0).nbytes])
    cut = path.read_bytes()
    layer_record.drop_after(path, 3)
    assert (tmp_path / "layers-before-step-4.npy").read_bytes() == cut
    assert path.read_bytes() == written(tmp_path / "four.npy", 4).read_bytes()


def test_a_last_row_of_zeros_is_dropped(tmp_path: Path) -> None:
    """A power cut may lose a row that the header doesn't count yet."""
    path = written(tmp_path / "layers.npy", 3)
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(row(0).nbytes))
    layer_record.drop_after(path, 9)
    assert path.read_bytes() == whole

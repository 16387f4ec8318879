"""What frozen models compute, stored beside a dataset: written once, checked when it is read."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from rungs.data.tokens import stored_arrays
from rungs.data.tokens.stored_arrays import Arrays, DamagedError, Store

COUNT = 10


def arrays_of(indices: Sequence[int]) -> Arrays:
    return {"a": np.array([[n, n + 1] for n in indices], np.int32)}


def store_in(folder: Path, of: str) -> Store:
    return Store.of(folder, "predictions", {"of": of}, COUNT, a=(np.int32, (2,)))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Ten sequences in files of four."""
    monkeypatch.setattr(stored_arrays, "_FILE_BYTES", 32)
    store = store_in(tmp_path, "a model")
    store.write(arrays_of)
    return store


def test_arrays_are_read_as_they_were_written(store: Store) -> None:
    assert store.exists()
    found = store.open()
    np.testing.assert_array_equal(found.read([9, 0, 4])["a"], [[9, 10], [0, 1], [4, 5]])
    np.testing.assert_array_equal(found.read_all("a"), arrays_of(range(COUNT))["a"])


def test_writing_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_arrays, "_FILE_BYTES", 32)
    asked: list[int] = []

    def stop_after_a_file(indices: Sequence[int]) -> Arrays:
        if next(iter(indices)) >= 4:
            raise KeyboardInterrupt
        return arrays_of(indices)

    def count(indices: Sequence[int]) -> Arrays:
        asked.extend(indices)
        return arrays_of(indices)

    other = store_in(tmp_path, "another model")
    with pytest.raises(KeyboardInterrupt):
        other.write(stop_after_a_file)
    assert not other.exists()
    other.write(count)
    assert asked == list(range(4, COUNT))
    np.testing.assert_array_equal(other.open().read_all("a"), arrays_of(range(COUNT))["a"])


@pytest.mark.parametrize(
    "change",
    [
        {"per_file": 0},
        {"per_file": 1},
        {"sequences": 11},
        {"sequences": 12},
        {"sha256": {}},
        {"format": 2},
        {"key": 3},
        {"key": {"of": "another model"}},
    ],
    ids=str,
)
def test_a_changed_description_is_damage(store: Store, change: dict[str, object]) -> None:
    keys = json.loads(store.description.read_text())
    store.description.write_text(json.dumps(keys | change))
    with pytest.raises(DamagedError):
        store.open()


def test_a_changed_file_is_damage(store: Store) -> None:
    (store.folder / "00001.safetensors").write_bytes(b"x")
    with pytest.raises(DamagedError, match="00001"):
        store.open()


def test_missing_arrays_are_no_error_of_reading(tmp_path: Path) -> None:
    store = store_in(tmp_path, "")
    assert not store.exists()
    with pytest.raises(DamagedError, match="no such file"):
        store.open()

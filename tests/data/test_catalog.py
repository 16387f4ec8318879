"""Datasets by name, their folders and their descriptions."""

import hashlib
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rungs.common.errors import UserError
from rungs.data import catalog
from rungs.data.catalog import find_datasets_dir, open_dataset
from rungs.data.tokens import dataset as dataset_module
from rungs.data.tokens.dataset import Dataset, Source, read_description
from tests.support.committed_runs import ROOT


def token_folder(place: Path, name: str = "mine", **splits: list[int]) -> Path:
    folder = place / name
    folder.mkdir(parents=True, exist_ok=True)
    for split, ids in splits.items():
        save_file({"tokens": np.array(ids, np.int32)}, folder / f"{split}.safetensors")
    return folder


# Names and folders


def test_the_datasets_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RUNGS_DATASETS_DIR", raising=False)
    assert find_datasets_dir() == ROOT / "datasets"
    monkeypatch.setenv("RUNGS_DATASETS_DIR", str(tmp_path))
    assert find_datasets_dir() == tmp_path
    assert find_datasets_dir(Path("here")) == Path("here")


INVALID_NAMES = [
    "",
    ".",
    "..",
    "../up",
    "a/..",
    "/etc",
    "a/b/c",
    "a//b",
    "a\\b",
    "a\0b",
    ".hidden",
    "o/.h",
]


@pytest.mark.parametrize("name", INVALID_NAMES)
def test_an_invalid_name_is_reported(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="not a name"):
        open_dataset(name, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_dataset_is_reported(tmp_path: Path) -> None:
    token_folder(tmp_path, "shakespeare", train=[1])
    with pytest.raises(UserError, match=r"did you mean shakespeare\?.*--name shakespere"):
        open_dataset("shakespere", tmp_path)
    with pytest.raises(UserError, match="did you mean python-stdlib"):
        open_dataset("python_stdlib", tmp_path)
    with pytest.raises(UserError, match="no such dataset; build it with"):
        open_dataset("x", tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


# A folder that the user put there


def test_a_folder_is_described(tmp_path: Path) -> None:
    folder = token_folder(tmp_path, train=[5, 900, 3], validation=[7])
    found = open_dataset("mine", tmp_path)
    assert found.splits == ("train", "validation")
    assert found.tokenizer_file is None
    np.testing.assert_array_equal(found.tokens("train")[:], [5, 900, 3])
    described = found.description.splits["train"]
    content = (folder / "train.safetensors").read_bytes()
    assert described.model_dump() == {
        "tokens": 3,
        "dtype": "int32",
        "largest_token_id": 900,
        "file_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
        "sample_sha256": hashlib.sha256(64 * content).hexdigest(),
        "pairs": None,
    }
    assert "pairs" not in (folder / "dataset.json").read_text()
    assert found.description.source.kind == "folder"
    assert read_description(folder) == found.description


def test_the_description_covers_all_of_a_large_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "_BLOCK_TOKENS", 7)
    for place in range(0, 40, 3):
        folder = tmp_path / str(place)
        folder.mkdir()
        tokens = np.zeros(40, np.uint16)
        tokens[place] = 9
        around: dict[str, np.ndarray] = {"before": np.ones(5), "after": np.ones(5, np.uint8)}
        save_file({"tokens": tokens, **around}, folder / "train.safetensors")
        described = Dataset("x", folder).description.splits["train"]
        assert described.largest_token_id == 9
        content = (folder / "train.safetensors").read_bytes()
        assert described.sha256 == hashlib.sha256(content).hexdigest()


def test_a_description_is_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_folder(tmp_path, train=[1, 2])
    first = open_dataset("mine", tmp_path).description
    monkeypatch.setattr(dataset_module, "_largest_id_and_checksum", None)
    assert open_dataset("mine", tmp_path).description == first


def test_changed_files_are_described_again(tmp_path: Path) -> None:
    folder = token_folder(tmp_path, train=[1, 2], validation=[3])
    before = open_dataset("mine", tmp_path).description
    token_folder(tmp_path, train=[1, 2, 8])
    after = open_dataset("mine", tmp_path).description
    assert after.splits["train"].largest_token_id == 8
    assert after.splits["validation"] == before.splits["validation"]
    (folder / "validation.safetensors").unlink()
    assert open_dataset("mine", tmp_path).splits == ("train",)
    assert read_description(folder) == open_dataset("mine", tmp_path).description


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"source": 3}', "\x00", '{"splits": {}}'])
def test_a_damaged_description_is_written_again(tmp_path: Path, damage: str) -> None:
    folder = token_folder(tmp_path, train=[1, 2])
    (folder / "dataset.json").write_text(damage)
    assert open_dataset("mine", tmp_path).description.splits["train"].tokens == 2
    assert json.loads((folder / "dataset.json").read_text())["source"] == {"kind": "folder"}


def test_a_read_only_folder_can_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = token_folder(tmp_path, train=[1, 2])

    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(dataset_module, "write_description", refuse)
    assert open_dataset("mine", tmp_path).description.splits["train"].tokens == 2
    assert [path.name for path in folder.iterdir()] == ["train.safetensors"]


def test_folders_that_are_not_datasets_are_reported(tmp_path: Path) -> None:
    token_folder(tmp_path, "empty")
    with pytest.raises(UserError, match=r"it has no train\.safetensors"):
        open_dataset("empty", tmp_path)
    token_folder(tmp_path, "negative", train=[1, -1])
    with pytest.raises(UserError, match="token id -1; ids must not be negative"):
        open_dataset("negative", tmp_path)
    (token_folder(tmp_path, "torn", train=[1]) / "train.safetensors").write_bytes(b"x" * 9)
    with pytest.raises(UserError, match="not a complete safetensors file"):
        open_dataset("torn", tmp_path)


# Pairs


def pair_folder(place: Path, bounds: list[list[int]], name: str = "pairs") -> Path:
    folder = place / name
    folder.mkdir(parents=True, exist_ok=True)
    parts = {"tokens": np.arange(10, dtype=np.uint16), "pair_bounds": np.array(bounds)}
    save_file(parts, folder / "train.safetensors")
    return folder


def test_pairs_are_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = pair_folder(tmp_path, [[1, 6], [6, 8], [9, 10]])
    found = open_dataset("pairs", tmp_path)
    assert found.holds_pairs
    pairs = found.description.splits["train"].pairs
    assert pairs is not None
    assert pairs.model_dump(exclude_none=True) == {
        "pairs": 3,
        "longest_tokens": 6,
        "answer_tokens": 8,
    }
    assert read_description(folder) == found.description
    monkeypatch.setattr(dataset_module, "_describe_pairs", None)
    assert open_dataset("pairs", tmp_path).description == found.description


def test_pairs_that_replace_text_are_described_again(tmp_path: Path) -> None:
    text = {"tokens": np.arange(10, dtype=np.uint16), "pair_limits": np.array([[1, 2], [2, 10]])}
    folder = pair_folder(tmp_path, [[1, 2], [2, 10]])
    file = folder / "train.safetensors"
    size = file.stat().st_size
    save_file(text, file)
    assert file.stat().st_size == size
    assert not open_dataset("pairs", tmp_path).holds_pairs
    pair_folder(tmp_path, [[1, 2], [2, 10]])
    os.utime(file, (1, 1))
    assert open_dataset("pairs", tmp_path).holds_pairs


@pytest.mark.parametrize(
    "bounds",
    [
        [[1, 2], [2, 4], [3, 10]],
        [[1, 2], [4, 4], [8, 10]],
        [[0, 1], [2, 4], [8, 10]],
        [[-1, 2], [2, 4], [8, 10]],
        [[1, 2], [2, 4], [8, 9]],
        [[1, 2], [2, 4], [8, 2**62]],
    ],
)
def test_invalid_bounds_are_reported(tmp_path: Path, bounds: list[list[int]]) -> None:
    folder = pair_folder(tmp_path, bounds)
    with pytest.raises(UserError, match=r"its answers don't follow|fewer than two tokens"):
        open_dataset("pairs", tmp_path)
    assert [path.name for path in folder.iterdir()] == ["train.safetensors"]


# Atomic folders


def test_a_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="cannot be written to"):
        open_dataset("python-stdlib", tmp_path / "file")


def test_one_of_two_starts_builds_and_the_other_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds = list[Path]()

    def build(folder: Path) -> Source:
        builds.append(folder)
        time.sleep(0.2)
        token_folder(folder.parent, folder.name, train=[1, 2, 3])
        return Source(kind="python-stdlib")

    monkeypatch.setitem(catalog.BUILT_IN, "python-stdlib", build)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda _: open_dataset("python-stdlib", tmp_path), range(2)))
    assert [len(dataset.tokens("train")) for dataset in found] == [3, 3]
    assert len(builds) == 1

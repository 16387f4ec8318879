"""Which tensor is in which file, and the index, in the format of Hugging Face."""

import json
from pathlib import Path

import pytest
from huggingface_hub import split_state_dict_into_shards_factory
from hypothesis import given
from hypothesis import strategies as st

from rungs.checkpointing.weights_file import file_or_index, place_tensors, read_index, write_index
from rungs.common.errors import UserError

SIZE = {"a": 3, "b": 4}
SIZES = st.dictionaries(st.text("ab.", min_size=1, max_size=4), st.integers(0, 12), max_size=12)


@given(sizes=SIZES.filter(bool), limit=st.integers(1, 30))
def test_shards_are_those_of_hugging_face(sizes: dict[str, int], limit: int) -> None:
    theirs = split_state_dict_into_shards_factory(
        sizes,
        get_storage_size=lambda size: size,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=limit,
    )
    assert place_tensors(sizes, limit) == theirs.filename_to_tensors


def test_a_tensor_larger_than_the_limit_gets_its_own_shard() -> None:
    files = place_tensors({"a": 4, "large": 11, "b": 4, "c": 4}, 10)
    assert list(files.values()) == [["large"], ["a", "b"], ["c"]]


def test_weights_of_exactly_the_limit_take_one_file() -> None:
    assert place_tensors({"a": 4, "b": 6}, 10) == {"model.safetensors": ["a", "b"]}
    assert place_tensors({}, 10) == {"model.safetensors": []}


def test_the_index_names_the_file_of_each_tensor(tmp_path: Path) -> None:
    write_index(tmp_path, {"model-1.safetensors": ["b"], "model-2.safetensors": ["a"]}, SIZE)
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_size": 7},
        "weight_map": {"a": "model-2.safetensors", "b": "model-1.safetensors"},
    }
    assert read_index(tmp_path / "model.safetensors.index.json") == {
        "a": tmp_path / "model-2.safetensors",
        "b": tmp_path / "model-1.safetensors",
    }


def test_one_file_has_no_index(tmp_path: Path) -> None:
    write_index(tmp_path, {"model.safetensors": ["a", "b"]}, SIZE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "[" * 100_000]
)
def test_a_damaged_index_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    with pytest.raises(UserError, match="no such file"):
        read_index(path)
    path.write_text(text)
    with pytest.raises(UserError, match="damaged; it must have a weight_map"):
        read_index(path)


def test_an_index_must_name_files_in_its_own_folder(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {"a": "../../elsewhere.safetensors"}}')
    with pytest.raises(UserError, match="damaged; it must have a weight_map"):
        read_index(path)


def test_a_single_file_takes_precedence_over_an_index(tmp_path: Path) -> None:
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    assert file_or_index(file) == file
    index.write_text("{}")
    assert file_or_index(file) == index
    assert file_or_index(tmp_path) == tmp_path
    assert file_or_index(Path()) == Path()
    file.write_bytes(b"")
    assert file_or_index(file) == file

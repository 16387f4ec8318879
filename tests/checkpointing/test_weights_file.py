"""Weights in one file and in shards, in the format of Hugging Face: headers, round trip, damage;
files written in parts."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from rungs.checkpointing.load import load_tokenizer
from rungs.checkpointing.weights_file import (
    Origin,
    TensorSpec,
    TensorWriter,
    Weights,
    WeightsHeader,
    all_finite,
    bits,
    file_or_index,
    place_tensors,
    read_index,
    write_index,
    write_weights,
)
from rungs.common.errors import UserError
from tests.support.configs import model_config, train_config
from tests.support.published_models import arrays

ORIGIN = Origin(source="someone/small", model_type="gpt2", dtype="bfloat16")
HEADER = WeightsHeader(model_config(), train_config(), "gpt2", ORIGIN)
RNG = np.random.default_rng(0)
ARRAYS: dict[str, np.ndarray] = {
    "wide": RNG.normal(size=(50, 7)).astype(np.float32),
    "half": RNG.normal(size=(100, 3)).astype(np.float16),
    "scalar": np.asarray(7, np.float32),
    "large": RNG.normal(size=(40, 30)).astype(np.float32),
    "again": RNG.normal(size=(20, 10)).astype(np.float32),
}
LIMIT = 2_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The arrays in shards of at most 2,000 bytes; one array has 4,800."""
    write_weights(tmp_path, ARRAYS, HEADER, LIMIT)
    return tmp_path


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_small_weights_are_one_file(tmp_path: Path) -> None:
    write_weights(tmp_path, ARRAYS, HEADER, sum(array.nbytes for array in ARRAYS.values()))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]


def test_large_weights_are_shards_that_an_index_names(folder: Path) -> None:
    names = [path.name for path in shards(folder)]
    assert names == [f"model-{n:05d}-of-00003.safetensors" for n in (1, 2, 3)]
    assert {path.name for path in folder.iterdir()} == {*names, "model.safetensors.index.json"}
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(array.nbytes for array in ARRAYS.values())}
    for path in shards(folder):
        with safe_open(path, framework="numpy") as file:
            held = set(file.keys())
            size = sum(file.get_tensor(name).nbytes for name in held)
        assert held == {name for name, file in index["weight_map"].items() if file == path.name}
        assert size <= LIMIT or held == {"large"}
    assert index["weight_map"].keys() == ARRAYS.keys()


def test_each_shard_has_the_header(folder: Path) -> None:
    assert [Weights(path).header for path in shards(folder)] == [HEADER] * 3


def test_a_tensor_that_is_not_finite_is_refused_when_it_is_read(tmp_path: Path) -> None:
    broken = ARRAYS | {"wide": ARRAYS["wide"].copy(), "half": ARRAYS["half"].copy()}
    broken["wide"][49, 6], broken["half"][3, 1] = np.nan, -np.inf
    write_weights(tmp_path, broken, HEADER, LIMIT)
    weights = Weights(tmp_path / "model.safetensors")
    weights.array("large")
    for name in ("wide", "half"):
        with pytest.raises(UserError, match=f"tensor {name}: has NaN or infinite values"):
            weights.array(name)


def test_equal_weights_give_equal_files_whatever_their_order(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_weights(other, dict(reversed(ARRAYS.items())), HEADER, LIMIT)
    for path in other.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes(), path.name


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_shards_are_read_like_one_file(name: str, folder: Path) -> None:
    weights = Weights(folder / name)
    assert weights.path == folder / "model.safetensors.index.json"
    assert weights.header == HEADER
    assert weights.names() == ARRAYS.keys()
    weights.check_tensors({name: array.shape for name, array in ARRAYS.items()})
    for tensor, array in ARRAYS.items():
        assert weights.array(tensor).dtype == array.dtype
        assert weights.array(tensor).tobytes() == array.tobytes()


def test_the_tokenizer_is_beside_the_weights_and_no_link_out_of_their_folder(folder: Path) -> None:
    assert Weights(folder / "model.safetensors").tokenizer == "gpt2"
    file = folder / "tokenizer.json"
    file.write_text("{}")
    assert Weights(folder / "model.safetensors").tokenizer_file == file
    secret = file.rename(folder.parent / "secret")
    file.symlink_to(secret)
    for read in (load_tokenizer, lambda path: Weights(path / "model.safetensors").tokenizer_file):
        with pytest.raises(UserError, match="is a link out of its folder, to"):
            read(folder)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        Weights(folder / "model.safetensors")
    (line,) = str(raised.value).splitlines()
    return line


def test_a_missing_or_truncated_shard_is_named(folder: Path) -> None:
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-1])
    assert refusal(folder).startswith(f"{path}: not readable as safetensors")
    path.unlink()
    assert refusal(folder).startswith(f"{path}: no such file, but model.safetensors.index.json")


def test_shards_without_a_rungs_header_are_refused(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"a": ARRAYS["half"]}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "x.safetensors"}}')
    assert "has no model.json that Rungs can read" in refusal(tmp_path)


def test_tensors_are_written_in_any_order_and_in_parts(tmp_path: Path) -> None:
    specs = {
        "half": TensorSpec("bfloat16", (3,)),
        "stacked": TensorSpec("float32", (2, 2, 3)),
        "scalar": TensorSpec("float32", ()),
    }
    half = np.arange(3).astype(ml_dtypes.bfloat16)
    stacked = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    with TensorWriter(tmp_path / "model.safetensors", specs, {"format": "pt"}) as writer:
        writer.write("scalar", np.asarray(7, np.float32))
        for index in ((1, 1), (0, 1), (1, 0), (0, 0)):
            writer.write("stacked", stacked[index], index)
        writer.write("half", half.view(np.uint16))
    found = arrays(tmp_path)
    np.testing.assert_array_equal(found["stacked"], stacked)
    np.testing.assert_array_equal(found["half"], half)
    assert found["scalar"] == 7


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_one_element_that_is_not_finite_is_found_anywhere(dtype: type) -> None:
    values: np.ndarray = np.zeros((3, 200_000), dtype)
    limits = ml_dtypes.finfo(dtype)
    values[0, :4] = limits.max, limits.min, limits.smallest_subnormal, -0.0
    name = np.dtype(dtype).name
    assert all_finite(values, name)
    assert all_finite(bits(values).T, name)
    for bad in (np.nan, -np.nan, np.inf, -np.inf):
        broken = values.copy()
        broken[2, -1] = bad
        assert not all_finite(broken, name)
        assert not all_finite(bits(broken).T, name)


SIZE = {"a": 3, "b": 4}


def test_files_are_named_as_on_the_hub() -> None:
    assert place_tensors({"a": 4, "b": 6}, 10) == {"model.safetensors": ["a", "b"]}
    assert place_tensors({"a": 4, "large": 11, "b": 4}, 10) == {
        "model-00001-of-00002.safetensors": ["large"],
        "model-00002-of-00002.safetensors": ["a", "b"],
    }


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
    "text",
    ["", "[]", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../b"}}'],
)
def test_a_damaged_index_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    with pytest.raises(UserError, match="no such file"):
        read_index(path)
    path.write_text(text)
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

"""Weights in one file and in shards: headers, round trip, damage; files written in parts."""

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


def test_the_order_of_the_arrays_changes_nothing(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_weights(other, dict(reversed(ARRAYS.items())), HEADER, LIMIT)
    index = "model.safetensors.index.json"
    assert (other / index).read_bytes() == (folder / index).read_bytes()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_equal_weights_and_headers_give_equal_files(folder: Path, tmp_path: Path) -> None:
    for number in range(5):
        again = tmp_path / f"again-{number}"
        again.mkdir()
        write_weights(again, ARRAYS, HEADER, LIMIT)
        assert contents(again) == {name: (folder / name).read_bytes() for name in contents(again)}


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


def test_the_tokenizer_of_shards_is_in_their_folder(folder: Path) -> None:
    assert Weights(folder / "model.safetensors").tokenizer == "gpt2"
    (folder / "tokenizer.json").write_text("{}")
    assert Weights(folder / "model.safetensors").tokenizer_file == folder / "tokenizer.json"


def test_a_tokenizer_that_is_a_link_out_of_the_folder_is_refused(folder: Path) -> None:
    secret = folder.parent / "secret"
    secret.write_text("{}")
    (folder / "tokenizer.json").symlink_to(secret)
    for read in (load_tokenizer, lambda path: Weights(path / "model.safetensors").tokenizer_file):
        with pytest.raises(UserError, match="is a link out of its folder, to"):
            read(folder)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        Weights(folder / "model.safetensors")
    (line,) = str(raised.value).splitlines()
    return line


def test_a_missing_shard_is_named(folder: Path) -> None:
    path = shards(folder)[1]
    path.unlink()
    assert refusal(folder).startswith(f"{path}: no such file, but model.safetensors.index.json")


def test_a_truncated_shard_is_named(folder: Path) -> None:
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-1])
    assert refusal(folder).startswith(f"{path}: not readable as safetensors")


def test_swapped_shards_are_refused(folder: Path) -> None:
    first, second, _ = shards(folder)
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    expected = f"{first}: its tensors differ from those that model.safetensors.index.json lists"
    assert refusal(folder) == expected


def test_a_shard_with_a_tensor_that_the_index_lacks_is_refused(folder: Path) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["scalar"]
    index.write_text(json.dumps(content))
    assert "its tensors differ from those that" in refusal(folder)


def test_a_shard_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    header = HEADER._replace(train=train_config(seed=1))
    write_weights(other, ARRAYS, header, LIMIT)
    shards(other)[2].replace(shards(folder)[2])
    expected = f"{shards(folder)[2]}: not from the same checkpoint as the first shard"
    assert refusal(folder).startswith(expected)


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

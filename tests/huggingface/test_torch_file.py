"""PyTorch files, written here without PyTorch in the same format."""

import pickle
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.huggingface.importing import Import, find_source
from rungs.huggingface.tensor_reader import torch_bits, torch_specs
from tests.support.published_models import MODELS, arrays, copy


class _Storage:
    def __init__(self, kind: type, key: str, numbers: np.ndarray) -> None:
        self.kind, self.key, self.numbers = kind, key, numbers


class _Tensor:
    def __init__(self, storage: _Storage, offset: int, shape: Any, strides: Any) -> None:
        self.arguments = (storage, offset, shape, strides, False, None)

    def __reduce__(self) -> Any:
        return sys.modules["torch._utils"]._rebuild_tensor_v2, self.arguments


class _Pickler(pickle.Pickler):
    def persistent_id(self, thing: Any) -> Any:
        if isinstance(thing, _Storage):
            return "storage", thing.kind, thing.key, "cpu", thing.numbers.size
        return None


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Fake modules with the names that PyTorch's pickles refer to."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in ("FloatStorage", "HalfStorage", "ByteStorage"):
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2(*_: Any) -> None: ...

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2  # type: ignore[attr-defined]
    torch._utils = utils  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._utils", utils)
    return torch


def tensor(torch: Any, key: str, array: np.ndarray, transposed: bool = False) -> _Tensor:
    kind = {"float32": torch.FloatStorage, "float16": torch.HalfStorage, "uint8": torch.ByteStorage}
    numbers = np.ascontiguousarray(array.T if transposed else array)
    steps = tuple(stride // array.itemsize for stride in numbers.strides)
    storage = _Storage(kind[array.dtype.name], key, numbers)
    return _Tensor(storage, 0, array.shape, steps[::-1] if transposed else steps)


def write(path: Path, content: Any) -> None:
    storages: dict[str, np.ndarray] = {}
    found = content.values() if isinstance(content, dict) else []
    for value in found:
        if isinstance(value, _Tensor):
            storages[value.arguments[0].key] = value.arguments[0].numbers
    with zipfile.ZipFile(path, "w") as archive:
        with archive.open("archive/data.pkl", "w") as file:
            _Pickler(file, protocol=2).dump(content)
        for key, numbers in storages.items():
            archive.writestr(f"archive/data/{key}", numbers.tobytes())


def test_safetensors_and_pytorch_files_give_the_same_model(
    torch: types.ModuleType, tmp_path: Path
) -> None:
    folder = copy("gpt2", tmp_path / "source")
    (folder / "model.safetensors").unlink()
    tensors = arrays(MODELS / "gpt2")
    content = {
        name: tensor(torch, str(number), array, transposed=array.ndim > 1)
        for number, (name, array) in enumerate(tensors.items())
    }
    write(folder / "pytorch_model.bin", content)
    one, other = (
        Import.from_source(find_source(str(folder))),
        Import.from_source(find_source(str(MODELS / "gpt2"))),
    )
    assert one.match == other.match
    for name in one.match.names.values():
        np.testing.assert_array_equal(one.tensors.bits(name), other.tensors.bits(name))


def test_tensors_can_share_a_storage(torch: types.ModuleType, tmp_path: Path) -> None:
    numbers = np.arange(12, dtype=np.float32)
    storage = _Storage(torch.FloatStorage, "0", numbers)
    content = {"a": _Tensor(storage, 0, (2, 3), (3, 1)), "b": _Tensor(storage, 6, (3, 2), (1, 3))}
    path = tmp_path / "model.bin"
    write(path, content)
    assert {name: kind.shape for name, kind in torch_specs(path)} == {"a": (2, 3), "b": (3, 2)}
    rows = torch_bits(path, "b").view(np.float32)
    np.testing.assert_array_equal(rows, numbers[6:].reshape(2, 3).T)


def test_a_scalar_keeps_its_shape(torch: types.ModuleType, tmp_path: Path) -> None:
    storage = _Storage(torch.FloatStorage, "0", np.array([3, 4], np.float32))
    path = tmp_path / "model.bin"
    write(path, {"a": _Tensor(storage, 1, (), ())})
    assert torch_bits(path, "a").view(np.float32) == np.array(4, np.float32)
    assert torch_bits(path, "a").shape == ()


def test_a_tensor_beyond_its_storage_is_refused(torch: types.ModuleType, tmp_path: Path) -> None:
    storage = _Storage(torch.FloatStorage, "0", np.zeros(4, np.float32))
    path = tmp_path / "model.bin"
    write(path, {"a": _Tensor(storage, 2, (3,), (1,))})
    with pytest.raises(UserError, match="tensor a: damaged: it reaches beyond its storage"):
        torch_bits(path, "a")
    write(path, {"a": _Tensor(storage, 0, (3,), (-1,))})
    with pytest.raises(UserError, match="a tensor with an impossible shape"):
        list(torch_specs(path))


class _Attack:
    def __reduce__(self) -> Any:
        return print, ("run by a pickle",)


@pytest.mark.parametrize("content", [{"a": _Attack()}, {"a": 1}, [1, 2]])
def test_anything_but_tensors_is_refused_and_never_run(
    content: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.bin"
    write(path, content)
    with pytest.raises(UserError, match="contains objects other than named tensors"):
        list(torch_specs(path))
    assert capsys.readouterr().out == ""

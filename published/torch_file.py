"""PyTorch's `.bin` files read without PyTorch, and without running what a pickle may hold.

The format: a zip archive of `data.pkl`, which describes the tensors, and `data/<key>`, the numbers
of each storage (https://docs.pytorch.org/docs/stable/notes/serialization.html, since 1.6).
"""

import math
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from errors import UserError
from published.tensor_file import TensorType, bits

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "DoubleStorage": np.dtype(np.float64),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}


class _Storage(NamedTuple):
    dtype: np.dtype
    key: str
    """Name of its entry under `data/`."""


class _Tensor(NamedTuple):
    """Where a tensor's numbers stand in its storage."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def torch_types(path: Path) -> Iterator[tuple[str, TensorType]]:
    """Every tensor of a file with its type; raises UserError where it cannot be read."""
    _, tensors = _described(path)
    for name, tensor in tensors.items():
        yield name, TensorType(tensor.storage.dtype.name, tensor.shape)


def torch_bits(path: Path, name: str) -> np.ndarray:
    """The content of one tensor, as unsigned integers."""
    root, tensors = _described(path)
    storage, offset, shape, strides = tensors[name]
    try:
        with zipfile.ZipFile(path) as archive:
            numbers = np.frombuffer(archive.read(f"{root}/data/{storage.key}"), storage.dtype)
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise UserError(f"{path}: tensor {name}: damaged: {error}") from None
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if math.prod(shape) and not 0 <= offset <= last < len(numbers):
        raise UserError(f"{path}: tensor {name}: damaged; it reaches beyond its storage")
    steps = [stride * storage.dtype.itemsize for stride in strides]
    part = np.lib.stride_tricks.as_strided(numbers[offset:], shape, steps, writeable=False)
    return bits(np.ascontiguousarray(part))


def _described(path: Path) -> tuple[str, dict[str, _Tensor]]:
    """The name of a file's root folder, and its tensors."""
    try:
        with zipfile.ZipFile(path) as archive:
            description = next(n for n in archive.namelist() if n.endswith("/data.pkl"))
            with archive.open(description) as file:
                found = _Unpickler(file).load()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the download or copy is not whole") from None
    except (OSError, zipfile.BadZipFile, StopIteration, EOFError) as error:
        reason = str(error) or "no data.pkl"
        raise UserError(f"{path}: not a whole PyTorch file of the zip format: {reason}") from None
    except (pickle.UnpicklingError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: holds more than tensors by name: {error}") from None
    values = found.values() if isinstance(found, dict) else [None]
    if not all(isinstance(value, _Tensor) for value in values):
        raise UserError(f"{path}: holds more than tensors by name")
    tensors = {str(name): value for name, value in found.items()}
    return description.removesuffix("/data.pkl"), tensors


class _Unpickler(pickle.Unpickler):
    """Knows the few names that a pickle of tensors needs, and refuses all others."""

    def __init__(self, file: IO[bytes]) -> None:
        super().__init__(file)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _rebuild_parameter
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, *_ = pid
        if kind != "storage" or not isinstance(dtype, np.dtype):
            raise pickle.UnpicklingError("an unknown storage")
        return _Storage(dtype, str(key))


def _rebuild_tensor(
    storage: _Storage, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], *_: Any
) -> _Tensor:
    if not isinstance(storage, _Storage):
        raise pickle.UnpicklingError("a tensor without storage")
    numbers = (int(offset), tuple(map(int, shape)), tuple(map(int, strides)))
    if min((numbers[0], *numbers[1], *numbers[2])) < 0 or len(shape) != len(strides):
        raise pickle.UnpicklingError("a tensor of no possible shape")
    return _Tensor(storage, *numbers)


def _rebuild_parameter(tensor: _Tensor, *_: Any) -> _Tensor:
    return tensor

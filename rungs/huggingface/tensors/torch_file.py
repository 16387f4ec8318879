"""PyTorch's `.bin` files read without PyTorch, and without running what a pickle may hold.

The format: a zip archive of `data.pkl`, which describes the tensors, and `data/<key>`, the numbers
of each storage (https://docs.pytorch.org/docs/stable/notes/serialization.html, since 1.6).
"""

import math
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rungs.common.errors import UserError, reason
from rungs.common.paths import require_regular
from rungs.common.strict_json import format_name
from rungs.huggingface.tensors.torch_pickle import Tensor, tensors_in
from rungs.huggingface.tensors.writer import TensorType, bits

_DESCRIPTION = "/data.pkl"
_UNREADABLE = (OSError, ValueError, KeyError, EOFError, RuntimeError, OverflowError, struct.error)
"""What `zipfile` raises for damaged archives, beside its own error."""


def torch_types(path: Path) -> Iterator[tuple[str, TensorType]]:
    """Every tensor of a file with its type; raises UserError where it cannot be read."""
    _, tensors = _described(path)
    for name, tensor in tensors.items():
        yield name, TensorType(tensor.storage.dtype.name, tensor.shape)


def torch_bits(path: Path, name: str) -> np.ndarray:
    """The content of one tensor, as unsigned integers; raises UserError where it is damaged."""
    root, tensors = _described(path)
    tensor = tensors[name]
    try:
        with zipfile.ZipFile(path) as archive:
            content = _read(archive, f"{root}/data/{tensor.storage.key}", path)
        return bits(_array(tensor, np.frombuffer(content, tensor.storage.dtype)))
    except (zipfile.BadZipFile, *_UNREADABLE) as error:
        raise UserError(f"{path}: tensor {format_name(name)}: damaged: {reason(error)}") from None


def _array(tensor: Tensor, numbers: np.ndarray) -> np.ndarray:
    """A tensor in the numbers of its storage; raises ValueError where it is not whole in them."""
    _, offset, shape, strides = tensor
    size = math.prod(shape)
    if not size:
        return np.empty(shape, numbers.dtype)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if last >= len(numbers) or size > len(numbers):
        raise ValueError("it reaches beyond its storage")
    steps = [stride * numbers.itemsize for stride in strides]
    part = np.lib.stride_tricks.as_strided(numbers[offset:], shape, steps, writeable=False)
    return np.ascontiguousarray(part).reshape(shape)  # which makes a number a vector


def _described(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The name of a file's root folder, and its tensors."""
    try:
        require_regular(path)
        with zipfile.ZipFile(path) as archive:
            entry = next((n for n in archive.namelist() if n.endswith(_DESCRIPTION)), None)
            if entry is None:
                raise zipfile.BadZipFile("no data.pkl")
            pickled = _read(archive, entry, path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the download or copy is not whole") from None
    except (zipfile.BadZipFile, *_UNREADABLE) as error:
        raise UserError(
            f"{path}: not a whole PyTorch file of the zip format: {reason(error)}"
        ) from None
    try:
        return entry.removesuffix(_DESCRIPTION), tensors_in(pickled)
    except ValueError as error:
        raise UserError(f"{path}: holds more than tensors by name: {reason(error)}") from None


def _read(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """An entry, which PyTorch does not compress, so that none is larger than the file."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
        raise zipfile.BadZipFile(f"{name} is not stored as PyTorch does it")
    return archive.read(entry)

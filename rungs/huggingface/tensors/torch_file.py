"""Read PyTorch's `.bin` files without PyTorch, and without running the pickle in them.

The format: a zip archive of `data.pkl`, which describes the tensors, and `data/<key>`, the content
of each storage (https://docs.pytorch.org/docs/stable/notes/serialization.html, since 1.6).
"""

import math
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rungs.checkpointing.tensor_writer import TensorSpec, bits
from rungs.common.errors import UserError, reason
from rungs.common.paths import require_regular
from rungs.common.strict_json import format_name
from rungs.huggingface.tensors.torch_pickle import Tensor, parse_tensors

_DESCRIPTION = "/data.pkl"
_READ_ERRORS = (OSError, ValueError, KeyError, EOFError, RuntimeError, OverflowError, struct.error)
"""What `zipfile` raises for damaged archives, besides `BadZipFile`."""


def torch_specs(path: Path) -> Iterator[tuple[str, TensorSpec]]:
    """Yield name and spec of every tensor in a file; raises UserError if it is unreadable."""
    _, tensors = _describe(path)
    for name, tensor in tensors.items():
        yield name, TensorSpec(tensor.storage.dtype.name, tensor.shape)


def torch_bits(path: Path, name: str) -> np.ndarray:
    """Return one tensor as unsigned integers; raises UserError if it is damaged."""
    root, tensors = _describe(path)
    tensor = tensors[name]
    try:
        with zipfile.ZipFile(path) as archive:
            content = _read(archive, f"{root}/data/{tensor.storage.key}", path)
        return bits(_array(tensor, np.frombuffer(content, tensor.storage.dtype)))
    except (zipfile.BadZipFile, *_READ_ERRORS) as error:
        raise UserError(f"{path}: tensor {format_name(name)}: damaged: {reason(error)}") from None


def _array(tensor: Tensor, storage: np.ndarray) -> np.ndarray:
    """Return a tensor from the content of its storage; raises ValueError if it does not fit."""
    _, offset, shape, strides = tensor
    size = math.prod(shape)
    if not size:
        return np.empty(shape, storage.dtype)
    last = offset + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    if last >= len(storage) or size > len(storage):
        raise ValueError("it reaches beyond its storage")
    steps = [stride * storage.itemsize for stride in strides]
    view = np.lib.stride_tricks.as_strided(storage[offset:], shape, steps, writeable=False)
    return np.ascontiguousarray(view).reshape(shape)  # ascontiguousarray makes scalars vectors


def _describe(path: Path) -> tuple[str, dict[str, Tensor]]:
    """Return the name of the archive's root folder, and its tensors."""
    try:
        require_regular(path)
        with zipfile.ZipFile(path) as archive:
            entry = next((n for n in archive.namelist() if n.endswith(_DESCRIPTION)), None)
            if entry is None:
                raise zipfile.BadZipFile("no data.pkl")
            pickled = _read(archive, entry, path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the download or copy is incomplete") from None
    except (zipfile.BadZipFile, *_READ_ERRORS) as error:
        raise UserError(
            f"{path}: not a complete PyTorch file in zip format: {reason(error)}"
        ) from None
    try:
        return entry.removesuffix(_DESCRIPTION), parse_tensors(pickled)
    except ValueError as error:
        raise UserError(
            f"{path}: contains objects other than named tensors: {reason(error)}"
        ) from None


def _read(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """Return an entry. PyTorch does not compress, so an entry cannot be larger than the file."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
        raise zipfile.BadZipFile(f"{name} is not stored the way PyTorch does")
    return archive.read(entry)

"""Safetensors files written tensor by tensor, each laid out before its content is known.

The format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import ml_dtypes
import numpy as np

CODES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The format's names of the types that parameters may have, by NumPy's."""
_TYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class TensorType(NamedTuple):
    """What a tensor is before its content is known."""

    dtype: str
    """NumPy's name for it, one of `CODES` where the tensor is to be written."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What it takes in a file."""
        return _TYPES[self.dtype].itemsize * math.prod(self.shape)


class TensorWriter:
    """A safetensors file whose tensors come in any order, also in parts.

    Args:
        path: of the file, which is made.
        types: of all its tensors, each of which must be written.
        metadata: of its header.
    """

    def __init__(
        self, path: Path, types: Mapping[str, TensorType], metadata: Mapping[str, str]
    ) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end, self._begins = 0, dict[str, int]()
        self._types = types
        for name in sorted(types, key=lambda name: (-_TYPES[types[name].dtype].itemsize, name)):
            begin, end = end, end + types[name].bytes
            self._begins[name] = begin
            header[name] = {
                "dtype": CODES[types[name].dtype],
                "shape": list(types[name].shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text = text.ljust(math.ceil(len(text) / 8) * 8)
        self._data = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + end)

    def write(self, name: str, array: np.ndarray, index: tuple[int, ...] = ()) -> None:
        """Fill a tensor, or the part of it that `index` into its first axes stands for.

        Args:
            array: of the tensor's type, or its bits as unsigned integers.
        """
        kind = self._types[name]
        part_shape = kind.shape[len(index) :]
        assert array.shape == part_shape
        assert array.dtype.itemsize == _TYPES[kind.dtype].itemsize
        number = np.ravel_multi_index(index, kind.shape[: len(index)]) if index else 0
        self._file.seek(self._data + self._begins[name] + int(number) * array.nbytes)
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close it and, where all went well, see it onto the disk."""
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """An array in a type of `CODES`, by NumPy's name; itself where it has that."""
    with np.errstate(over="ignore"):  # what is too large becomes infinite
        return array.astype(_TYPES[dtype], copy=False)


def bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array as unsigned integers, which are moved fast, and never changed."""
    return array.view(f"u{array.dtype.itemsize}")

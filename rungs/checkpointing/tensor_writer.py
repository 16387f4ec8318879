"""Write safetensors files tensor by tensor, with a layout that is fixed up front:
https://github.com/huggingface/safetensors#format"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import ml_dtypes
import numpy as np

from rungs.common import disk

SAFETENSORS_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""The dtypes that parameters may have: NumPy's name, and that of the safetensors format."""
_PART = 1 << 18
"""Elements to check at a time: they fit a cache."""
_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


class TensorSpec(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: str
    """NumPy's name. To be written, the tensor needs one of `SAFETENSORS_DTYPES`."""
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size in a file."""
        return _DTYPES[self.dtype].itemsize * math.prod(self.shape)


class TensorWriter:
    """A safetensors file whose tensors are written in any order, whole or in parts. `specs` are all
    its tensors, each of which must be written; `metadata` is for its header."""

    def __init__(
        self, path: Path, specs: Mapping[str, TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        end, self._begins = 0, dict[str, int]()
        self._specs = specs
        for name in sorted(specs, key=lambda name: (-_DTYPES[specs[name].dtype].itemsize, name)):
            begin, end = end, end + specs[name].bytes
            self._begins[name] = begin
            header[name] = {
                "dtype": SAFETENSORS_DTYPES[specs[name].dtype],
                "shape": list(specs[name].shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header).encode()
        text = text.ljust(math.ceil(len(text) / 8) * 8)
        self._data = 8 + len(text)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data + end)

    def write(self, name: str, array: np.ndarray, index: tuple[int, ...] = ()) -> None:
        """Write a tensor, or the part at `index` of its first axes. `array` is in the tensor's
        dtype, or its bits as unsigned integers."""
        spec = self._specs[name]
        part_shape = spec.shape[len(index) :]
        assert array.shape == part_shape
        assert array.dtype.itemsize == _DTYPES[spec.dtype].itemsize
        number = np.ravel_multi_index(index, spec.shape[: len(index)]) if index else 0
        self._file.seek(self._data + self._begins[name] + int(number) * array.nbytes)
        self._file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """Close the file. Without an error, flush it to disk first."""
        try:
            if error is None:
                disk.flush(self._file)
        finally:
            self._file.close()


def cast(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return an array in one of `SAFETENSORS_DTYPES`; the same array if it has that dtype."""
    with np.errstate(over="ignore"):  # values that are too large become infinite
        return array.astype(_DTYPES[dtype], copy=False)


def all_finite(array: np.ndarray, dtype: str) -> bool:
    """Return whether no element is NaN or infinite, as its exponent says. `array` is in `dtype`,
    one of `SAFETENSORS_DTYPES`, or its bits as unsigned integers."""
    infinity = bits(np.asarray(np.inf, _DTYPES[dtype]))
    flat = bits(array).reshape(-1)
    parts = (flat[at : at + _PART] for at in range(0, flat.size, _PART))
    return not any((part & infinity == infinity).any() for part in parts)


def bits(array: np.ndarray) -> np.ndarray:
    """Return an array as unsigned integers, which NumPy copies fast and never changes."""
    return array.view(f"u{array.dtype.itemsize}")

"""Read a GGUF file: its metadata and tensors. `gguf.GGUFReader` makes an array of each element of a
list: 25 s of CPU time for tokens, scores and types of Gemma's 262,144 tokens."""

import contextlib
import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from rungs.common import shown_text
from rungs.common.errors import UserError, reason
from rungs.common.paths import require_regular
from rungs.common.strict_json import format_name

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MOST_AXES = 4
_NUMBERS = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "u2",
    GGUFValueType.INT16: "i2",
    GGUFValueType.UINT32: "u4",
    GGUFValueType.INT32: "i4",
    GGUFValueType.FLOAT32: "f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "u8",
    GGUFValueType.INT64: "i8",
    GGUFValueType.FLOAT64: "f8",
}
_DEFAULT_ALIGNMENT = 32


class StoredTensor(NamedTuple):
    """A tensor's place in a file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    begin: int

    @property
    def bytes_shape(self) -> tuple[int, ...]:
        """The shape as bytes. Raises ValueError if rows are not whole blocks."""
        block, size = GGML_QUANT_SIZES[self.kind]
        if not self.shape or self.shape[-1] % block:
            raise ValueError(f"rows of shape {self.shape} are not whole blocks of {block}")
        return (*self.shape[:-1], self.shape[-1] // block * size)


class GGUFFile:
    """A file's `metadata` by key, and its `tensors` by name, each read when asked for. Raises
    UserError if it is damaged, big-endian, one of several parts, or has tensors of a type that
    cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._damage():
            require_regular(path)
            with path.open("rb") as file:
                self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self.metadata, self.tensors = _parse(self._content)
            for name, tensor in self.tensors.items():
                self._check(name, tensor)
        parts = self.metadata.get("split.count", 1)
        if parts not in (0, 1):
            count = shown_text.shown(str(parts))[:40]
            raise UserError(
                f"{path}: is one of several parts (split.count: {count}); join them with"
                " llama-gguf-split"
            )

    def read(self, name: str, part: int | None = None) -> np.ndarray:
        """Return a tensor, or one part along its first axis, as float32."""
        tensor = self.tensors[name]
        shape = tensor.bytes_shape
        stored = np.frombuffer(self._content, np.uint8, math.prod(shape), tensor.begin)
        stored = stored.reshape(shape)
        return dequantize(stored if part is None else stored[part], tensor.kind)

    def _check(self, name: str, tensor: StoredTensor) -> None:
        if not math.prod(tensor.bytes_shape):  # a huge first axis would take no bytes
            raise ValueError(f"tensor {format_name(name)} has no elements")
        if tensor.begin + math.prod(tensor.bytes_shape) > len(self._content):
            raise ValueError(f"tensor {format_name(name)} reaches beyond its end")
        try:
            dequantize(np.zeros(GGML_QUANT_SIZES[tensor.kind][1], np.uint8), tensor.kind)
        except NotImplementedError:
            raise ValueError(
                f"tensor {format_name(name)} has the type {tensor.kind.name}, which is unsupported"
            ) from None

    @contextlib.contextmanager
    def _damage(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, OverflowError, OSError, struct.error) as error:
            why = "it ends too early" if isinstance(error, struct.error) else reason(error)
            raise UserError(f"{self.path}: not a complete GGUF file: {why}") from None


def _parse(content: mmap.mmap) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    cursor = _Cursor(content)
    if content[:4] != _MAGIC:
        raise ValueError("it does not begin with GGUF")
    cursor.at = 4
    (version,) = cursor.numbers("<I")
    if version not in _VERSIONS:
        why = "it is big-endian" if version & 0xFFFF == 0 else f"version {version} is unsupported"
        raise ValueError(why)
    tensor_count, key_count = cursor.numbers("<QQ")
    metadata: dict[str, Any] = {}
    for _ in range(key_count):
        key = cursor.text()
        if key in metadata:
            raise ValueError(f"it has {format_name(key)} twice")
        metadata[key] = cursor.value(GGUFValueType(*cursor.numbers("<I")))
    infos = [(cursor.text(), cursor.tensor()) for _ in range(tensor_count)]
    if len(dict(infos)) < len(infos):
        raise ValueError("it has a tensor twice")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1:
        raise ValueError(f"general.alignment is {alignment!r}")
    data = math.ceil(cursor.at / alignment) * alignment
    return metadata, {name: tensor._replace(begin=data + tensor.begin) for name, tensor in infos}


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self.at = content, 0

    def numbers(self, pattern: str) -> tuple[int, ...]:
        found = struct.unpack_from(pattern, self._content, self.at)
        self.at += struct.calcsize(pattern)
        return found

    def text(self) -> str:
        (length,) = self.numbers("<Q")
        if length > len(self._content) - self.at:
            raise ValueError("it ends too early")
        self.at += length
        return self._content[self.at - length : self.at].decode()

    def value(self, kind: GGUFValueType) -> Any:
        """Return a text, a number or a list of either."""
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind != GGUFValueType.ARRAY:
            return self._array(kind, 1)[0]
        item, length = self.numbers("<IQ")
        if item == GGUFValueType.STRING:
            return [self.text() for _ in range(length)]
        return self._array(GGUFValueType(item), length)

    def _array(self, kind: GGUFValueType, length: int) -> list[Any]:
        if kind not in _NUMBERS:
            raise ValueError("it has lists of lists")
        numbers = np.frombuffer(self._content, np.dtype(_NUMBERS[kind]), length, self.at)
        self.at += numbers.nbytes
        if kind == GGUFValueType.FLOAT32:  # 1e-6 instead of 9.999999974752427e-07
            return [float(str(number)) for number in numbers]
        return numbers.tolist()

    def tensor(self) -> StoredTensor:
        """Return a tensor whose `begin` counts from the first tensor."""
        (axes,) = self.numbers("<I")
        if not 0 < axes <= _MOST_AXES:
            raise ValueError(f"a tensor has {axes} axes")
        shape = self.numbers(f"<{axes}Q")[::-1]
        kind, begin = self.numbers("<IQ")
        return StoredTensor(shape, GGMLQuantizationType(kind), begin)

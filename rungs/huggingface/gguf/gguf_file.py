"""Read a GGUF file: its metadata and tensors."""

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField
from gguf.quants import dequantize

from rungs.common import shown_text
from rungs.common.errors import UserError, reason
from rungs.common.strict_json import format_name


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray
    """The same axes, the last one in bytes if numbers are stored in blocks."""


class GGUFFile:
    """A file's `metadata` by key, and its `tensors` by name, each read when asked for. Raises
    UserError if it is damaged, big-endian, one of several parts, or has tensors of a type that
    cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with np.errstate(over="raise"):
                reader = _Reader(path)
            self.metadata = {key: _value(field) for key, field in reader.fields.items()}
            self.tensors = {
                tensor.name: StoredTensor(
                    tuple(tensor.shape.tolist()[::-1]), tensor.tensor_type, np.asarray(tensor.data)
                )
                for tensor in reader.tensors
            }
            for name, tensor in self.tensors.items():
                _check(name, tensor)
        except (ValueError, LookupError, ArithmeticError, OSError, struct.error) as error:
            ends_early = isinstance(error, IndexError | struct.error)
            why = "it ends too early" if ends_early else reason(error)
            raise UserError(f"{path}: not a complete GGUF file: {why}") from None
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
        return dequantize(tensor.data if part is None else tensor.data[part], tensor.kind)


class _Reader(GGUFReader):
    """`GGUFReader` makes an array of each element of a list: 25 s of CPU time for tokens, scores
    and types of Gemma's 262,144 tokens. Here a list is one part."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if self.byte_order == "S":
            raise ValueError("it is big-endian")
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        item, length = struct.unpack_from("<IQ", self.data.data, orig_offs)
        begin, kind = orig_offs + struct.calcsize("<IQ"), GGUFValueType(item)
        types = [GGUFValueType.ARRAY, kind]
        if kind == GGUFValueType.STRING:
            end, texts = self._texts(begin, length)
            return end - orig_offs, [texts], [0], types
        numbers = np.asarray(self._get(begin, self.gguf_scalar_to_np[kind], length))
        return begin + numbers.nbytes - orig_offs, [numbers], [0], types

    def _texts(self, at: int, count: int) -> tuple[int, list[str]]:
        """Return the offset after a number of texts, and the texts."""
        content, texts = self.data.data, []
        for _ in range(count):
            begin = at + 8
            at = begin + struct.unpack_from("<Q", content, at)[0]
            texts.append(str(content[begin:at], "utf-8"))
        return at, texts


def _value(field: ReaderField) -> Any:
    """Return a text, a number or a list of either."""
    kind, stored = field.types[-1], field.parts[-1]
    if kind == GGUFValueType.STRING:
        return stored if isinstance(stored, list) else str(stored.tobytes(), "utf-8")
    if kind == GGUFValueType.FLOAT32:  # 1e-6 instead of 9.999999974752427e-07
        values = [float(str(number)) for number in stored]
    else:
        values = stored.tolist()
    return values if field.types[0] == GGUFValueType.ARRAY else values[0]


def _check(name: str, tensor: StoredTensor) -> None:
    if not tensor.shape or not tensor.data.size:  # a huge first axis would take no bytes
        raise ValueError(f"tensor {format_name(name)} has no elements")
    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[tensor.kind][1], np.uint8), tensor.kind)
    except NotImplementedError:
        raise ValueError(
            f"tensor {format_name(name)} has the type {tensor.kind.name}, which is unsupported"
        ) from None

"""A GGUF file as what the importer takes: tensors by name, and what they are for."""

import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField, ReaderTensor
from gguf.quants import dequantize

from rungs.checkpointing.weights_file import TensorSpec, bits, cast
from rungs.common import paths
from rungs.common.errors import UserError, errors_at, reason
from rungs.huggingface.config_keys import HFConfig, Values
from rungs.huggingface.exporting import choose_family
from rungs.huggingface.gguf import vocabulary
from rungs.huggingface.gguf.architectures import (
    ARCHITECTURES,
    FREQUENCIES,
    PART,
    HasTensor,
    architecture_of,
)

SUFFIX, _MAGIC = ".gguf", b"GGUF"
_EMBEDDING = "token_embd.weight"
_DTYPES = {GGMLQuantizationType.F16: "float16", GGMLQuantizationType.BF16: "bfloat16"}
"""Dtypes of tensors that are not float32 once they are read; all are, if any is quantized."""


def is_gguf(path: Path) -> bool:
    """Return whether a path is called like a GGUF file, or is one of another name. Raises UserError
    if it can't be read."""
    if path.suffix.lower() == SUFFIX:
        return True
    if not path.is_file():
        return False
    with paths.open_given(path) as file:
        return file.read(len(_MAGIC)) == _MAGIC


class GGUFTensors:
    """The tensors of a file, under the names of its `architecture`, and its `model`. A tensor that
    holds all experts counts as one for each. Raises UserError if it is damaged or one of several
    parts, its architecture is not supported, or with a line for each metadata key that is unknown
    or asks for an unsupported feature; `ignored_keys` count as having no effect."""

    def __init__(self, path: Path, ignored_keys: Iterable[str] = ()) -> None:
        self._path = path
        try:
            reader = _Reader(path)
            self._metadata = {key: _value(field) for key, field in reader.fields.items()}
        except (ValueError, LookupError, OSError, struct.error) as error:
            raise UserError(f"{path}: not a complete GGUF file: {reason(error)}") from None
        if self._metadata.get("split.count", 1) not in (0, 1):
            raise UserError(f"{path}: is one of several parts; join them with llama-gguf-split")
        self._stored = {tensor.name: tensor for tensor in reader.tensors}
        keys = self._architecture_keys()
        keys.ignore(ignored_keys)
        architecture = architecture_of(keys)
        if architecture is None:
            known = ", ".join(sorted({each.model_type for each in ARCHITECTURES}))
            raise UserError(
                f"{path}: general.architecture: {keys.model_type!r} is not supported; supported"
                f" are {known}"
            )
        self.architecture = architecture
        for key in architecture.keys:
            if isinstance(key, HasTensor) and key.tensor in self._stored:
                keys.values[key.tensor] = True
        self.model = architecture.to_model_config(keys)
        kinds = {tensor.tensor_type for tensor in reader.tensors}
        dtypes = _DTYPES if kinds <= {GGMLQuantizationType.F32, *_DTYPES} else {}
        self.specs: dict[str, TensorSpec] = {}
        for name, tensor in self._stored.items():
            dtype, shape = dtypes.get(tensor.tensor_type, "float32"), _shape(tensor)
            if name == FREQUENCIES and keys.taken.get(FREQUENCIES) is not None:
                continue
            if len(shape) < 3:
                self.specs[name] = TensorSpec(dtype, shape)
            else:
                spec = TensorSpec(dtype, shape[1:])
                self.specs |= {f"{name}{PART}{number}": spec for number in range(shape[0])}

    def _architecture_keys(self) -> HFConfig:
        """Return the keys of the architecture, without its name before them."""
        name = str(self._metadata.get("general.architecture"))
        begin = f"{name}."
        keys: Values = {
            key.removeprefix(begin): value
            for key, value in self._metadata.items()
            if key.startswith(begin)
        }
        if _EMBEDDING in self._stored:
            keys["vocab_size"] = _shape(self._stored[_EMBEDDING])[0]
        if FREQUENCIES in self._stored:
            keys[FREQUENCIES] = self._stored[FREQUENCIES].data.tolist()
        return HFConfig(self._path, keys | {"model_type": name})

    def bits(self, name: str) -> np.ndarray:
        """Return a tensor's content as unsigned integers."""
        stored, _, part = name.partition(PART)
        tensor = self._stored[stored]
        data = tensor.data[int(part)] if part else tensor.data
        values = dequantize(np.asarray(data), tensor.tensor_type)
        values = self.architecture.convert(name, values, self.model, loads=True)
        return bits(cast(np.ascontiguousarray(values), self.specs[name].dtype))

    def hf_config(self) -> HFConfig:
        """Return a `config.json` for the model. Raises UserError if it has none."""
        with errors_at(f"{self._path}: "):
            choice = choose_family(self.model, self.architecture.model_type)
        return HFConfig(self._path, choice.family.to_hf_config(choice.model))

    def write_files(self, folder: Path) -> None:
        """Write the tokenizer and its files into a folder. Raises UserError if it is damaged or
        unsupported."""
        with errors_at(f"{self._path}: "):
            vocabulary.write_files(self._metadata, folder)


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
        content, at = self.data.data, orig_offs + struct.calcsize("<IQ")
        item, length = struct.unpack_from("<IQ", content, orig_offs)
        kind = GGUFValueType(item)
        if kind == GGUFValueType.STRING:
            part: Any = []
            for _ in range(length):
                begin = at + 8
                at = begin + struct.unpack_from("<Q", content, at)[0]
                part.append(str(content[begin:at], "utf-8"))
        else:
            part = np.asarray(self._get(at, self.gguf_scalar_to_np[kind], length))
            at += part.nbytes
        return at - orig_offs, [part], [0], [GGUFValueType.ARRAY, kind]


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


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(tensor.shape.tolist()[::-1])

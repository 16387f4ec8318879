"""Read the tensors of a Hugging Face model: one file, or shards with an index.

PyTorch's `.bin` files are read without PyTorch: a zip archive of `data.pkl`, which describes the
tensors, and `data/<key>`, the content of each storage
(https://docs.pytorch.org/docs/stable/notes/serialization.html, since 1.6). The pickle is never
executed: `pickletools.genops` splits it into opcodes, and those that describe tensors are applied
to a stack of plain values. Any other opcode is an error."""

import math
import pickletools
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from rungs.checkpointing.weights_file import (
    INDEX_FILE,
    SAFETENSORS_DTYPES,
    WEIGHTS_FILE,
    TensorSpec,
    bits,
    read_index,
)
from rungs.common.errors import UserError, reason
from rungs.common.paths import is_file, refuse_link_out, require_regular
from rungs.common.strict_json import format_name

_DTYPES = {code: dtype for dtype, code in SAFETENSORS_DTYPES.items()}
_DESCRIPTION = "/data.pkl"
_ZIP_ERRORS = (OSError, ValueError, KeyError, EOFError, RuntimeError, OverflowError, struct.error)
"""Errors of `zipfile` for damaged archives, besides `BadZipFile`."""
_STORAGES = {
    "torch FloatStorage": np.dtype(np.float32),
    "torch HalfStorage": np.dtype(np.float16),
    "torch BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "torch DoubleStorage": np.dtype(np.float64),
    "torch LongStorage": np.dtype(np.int64),
    "torch IntStorage": np.dtype(np.int32),
    "torch ByteStorage": np.dtype(np.uint8),
    "torch BoolStorage": np.dtype(np.bool_),
}
_LITERALS = {"BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_MAX_INTEGER = 2**62


def safetensors_specs(path: Path) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the name and spec of every tensor in a file. Raises UserError if it is unreadable."""
    try:
        require_regular(path)
        with safe_open(path, framework="numpy") as file:
            for name in file.keys():  # noqa: SIM118 — no mapping
                part = file.get_slice(name)
                code = part.get_dtype()
                yield name, TensorSpec(_DTYPES.get(code, code), tuple(part.get_shape()))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the download or copy is incomplete") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a complete safetensors file: {reason(error)}") from None


def _safetensors_bits(path: Path, name: str) -> np.ndarray:
    """Return the content of a tensor. Opens the file each time, so that memory is freed."""
    with safe_open(path, framework="numpy") as file:
        return bits(file.get_tensor(name))


class Storage(NamedTuple):
    """The data that one or more tensors view."""

    dtype: np.dtype
    key: str
    """Name of its entry under `data/`."""


class TorchTensor(NamedTuple):
    """A view of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Global(str):
    """Module and name of a Python object, which is never looked up."""


def parse_tensors(pickled: bytes) -> dict[str, TorchTensor]:
    """Return the tensors in a pickle, by name. Raises ValueError if it has anything else."""
    parser = _Parser()
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            parser.follow(opcode.name, argument)
        (value,) = parser.stack
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"opcodes out of order ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("no names")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, TorchTensor):
            raise ValueError(f"{name!r} is not a tensor")
    return value


class _Parser:
    """Stack, marks and memo of a pickle interpreter that never calls anything."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def follow(self, opcode: str, argument: Any) -> None:
        """Apply an opcode. Raises ValueError for one that tensors do not need."""
        match opcode:
            case "PROTO" | "STOP":
                pass
            case "MARK":
                self._marks.append(len(self.stack))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self.stack[-1]
            case "BUILD":  # attributes of an OrderedDict: the versions of modules
                self._pop(1)
            case "SETITEM":
                self._set_items(self._pop(2))
            case "SETITEMS":
                self._set_items(self._pop_to_mark())
            case _:
                self.stack.append(self._value(opcode, argument))

    def _value(self, opcode: str, argument: Any) -> Any:
        """Return the value that an opcode pushes onto the stack."""
        if opcode in _LITERALS:
            return argument
        if opcode in _CONSTANTS:
            return _CONSTANTS[opcode]
        match opcode:
            case "EMPTY_DICT":
                return {}
            case "BINGET" | "LONG_BINGET":
                return self._memo[argument]
            case "TUPLE":
                return tuple(self._pop_to_mark())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                return tuple(self._pop(int(opcode[-1])))
            case "GLOBAL":
                return _Global(argument)
            case "BINPERSID":
                return _storage(*self._pop(1))
            case "REDUCE":
                return _call(*self._pop(2))
        raise ValueError(f"it holds {opcode}")

    def _pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError("a value is missing")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _pop_to_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError("items without a dictionary")
        target.update(zip(values[::2], values[1::2], strict=True))


def _storage(reference: Any) -> Storage:
    kind, name, key, *_ = reference
    if kind != "storage" or name not in _STORAGES or not isinstance(name, _Global):
        raise ValueError(f"a storage {name!r}")
    return Storage(_STORAGES[name], str(key))


def _call(name: Any, arguments: Any) -> Any:
    """Return the result of calling a global, for the few that tensors need."""
    if isinstance(name, _Global) and isinstance(arguments, tuple):
        match name:
            case "collections OrderedDict" if arguments == ():
                return {}
            case "torch._utils _rebuild_tensor_v2":
                return _tensor(*arguments[:4])
            case "torch._utils _rebuild_parameter" if isinstance(arguments[0], TorchTensor):
                return arguments[0]
    raise ValueError(str(name).replace(" ", "."))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> TorchTensor:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without storage")
    are_valid = all(type(number) is int and 0 <= number <= _MAX_INTEGER for number in numbers)
    if not are_valid or len(shape) != len(strides):
        raise ValueError("a tensor with an impossible shape")
    return TorchTensor(storage, offset, tuple(shape), tuple(strides))


def torch_specs(path: Path) -> Iterator[tuple[str, TensorSpec]]:
    """Yield the name and spec of every tensor in a file. Raises UserError if it is unreadable."""
    _, tensors = _describe_torch(path)
    for name, tensor in tensors.items():
        yield name, TensorSpec(tensor.storage.dtype.name, tensor.shape)


def torch_bits(path: Path, name: str) -> np.ndarray:
    """Return one tensor as unsigned integers. Raises UserError if it is damaged."""
    root, tensors = _describe_torch(path)
    tensor = tensors[name]
    try:
        with zipfile.ZipFile(path) as archive:
            content = _read_entry(archive, f"{root}/data/{tensor.storage.key}", path)
        return bits(_torch_array(tensor, np.frombuffer(content, tensor.storage.dtype)))
    except (zipfile.BadZipFile, *_ZIP_ERRORS) as error:
        raise UserError(f"{path}: tensor {format_name(name)}: damaged: {reason(error)}") from None


def _torch_array(tensor: TorchTensor, storage: np.ndarray) -> np.ndarray:
    """Return a tensor from its storage's content. Raises ValueError if it does not fit."""
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


def _describe_torch(path: Path) -> tuple[str, dict[str, TorchTensor]]:
    """Return the name of the archive's root folder, and its tensors."""
    try:
        require_regular(path)
        with zipfile.ZipFile(path) as archive:
            entry = next((n for n in archive.namelist() if n.endswith(_DESCRIPTION)), None)
            if entry is None:
                raise zipfile.BadZipFile("no data.pkl")
            pickled = _read_entry(archive, entry, path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; the download or copy is incomplete") from None
    except (zipfile.BadZipFile, *_ZIP_ERRORS) as error:
        raise UserError(
            f"{path}: not a complete PyTorch file in zip format: {reason(error)}"
        ) from None
    try:
        return entry.removesuffix(_DESCRIPTION), parse_tensors(pickled)
    except ValueError as error:
        raise UserError(
            f"{path}: contains objects other than named tensors: {reason(error)}"
        ) from None


def _read_entry(archive: zipfile.ZipFile, name: str, path: Path) -> bytes:
    """Return an entry. PyTorch does not compress, so it cannot be larger than the file."""
    entry = archive.getinfo(name)
    if entry.compress_type != zipfile.ZIP_STORED or entry.file_size > path.stat().st_size:
        raise zipfile.BadZipFile(f"{name} is not stored the way PyTorch does")
    return archive.read(entry)


class _Format(NamedTuple):
    single: str
    """Name of a file without shards."""
    index_file: str
    """Name of the index that maps tensors to shards."""
    specs: Callable[[Path], Iterator[tuple[str, TensorSpec]]]
    bits: Callable[[Path, str], np.ndarray]


_FORMATS = (
    _Format(WEIGHTS_FILE, INDEX_FILE, safetensors_specs, _safetensors_bits),
    _Format("pytorch_model.bin", "pytorch_model.bin.index.json", torch_specs, torch_bits),
)


class Tensors(Protocol):
    """Named tensors that are read one at a time."""

    specs: dict[str, TensorSpec]

    def bits(self, name: str) -> np.ndarray:
        """Return a tensor's content as unsigned integers."""


class TensorFolder:
    """A folder's tensors, read one at a time from safetensors files, or else from PyTorch files.
    Raises UserError if it has no weights, or a shard is missing or damaged."""

    def __init__(self, folder: Path) -> None:
        self._format, first, self._files = _find(folder)
        self.specs: dict[str, TensorSpec] = {}
        """dtype and shape of each tensor, by name. Buffers may have any dtype."""
        for path in sorted({first, *self._files.values()}):
            refuse_link_out(path)
            for name, spec in self._format.specs(path):
                if self._files.setdefault(name, path) == path:
                    self.specs[name] = spec
        for name, path in self._files.items():
            if name not in self.specs:
                raise UserError(
                    f"{path}: tensor {format_name(name)}: missing; {self._format.index_file} has it"
                )

    def bits(self, name: str) -> np.ndarray:
        """Return a tensor's content as unsigned integers."""
        return self._format.bits(self._files[name], name)


def _find(folder: Path) -> tuple[_Format, Path, dict[str, Path]]:
    """Return the format of a folder's weights, one of the files, and each tensor's file."""
    for weights_format in _FORMATS:
        if is_file(folder / weights_format.single):
            return weights_format, folder / weights_format.single, {}
        if is_file(folder / weights_format.index_file):
            files = read_index(folder / weights_format.index_file)
            return weights_format, next(iter(files.values())), files
    raise UserError(f"{folder}: has no weights; needs {WEIGHTS_FILE} or {INDEX_FILE}")

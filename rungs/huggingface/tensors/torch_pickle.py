"""Parse the pickle that describes the tensors of a PyTorch `.bin` file, without running it.

`pickletools.genops` splits a pickle into opcodes and executes nothing. This module follows those
opcodes that PyTorch writes for named tensors, on a stack of plain values. Any other opcode is an
error.

The opcodes: https://docs.python.org/3/library/pickletools.html
"""

import pickletools
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

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


class Storage(NamedTuple):
    """The numbers that one or several tensors view."""

    dtype: np.dtype
    key: str
    """Name of its entry under `data/`."""


class Tensor(NamedTuple):
    """A view of a storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Global(str):
    """Module and name of a Python object. It is never looked up."""


def parse_tensors(pickled: bytes) -> dict[str, Tensor]:
    """Return the tensors that a pickle describes, by name.

    Raises:
        ValueError: it is damaged, or describes anything else.
    """
    parser = _Parser()
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            parser.follow(opcode.name, argument)
        (value,) = parser.stack
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"opcodes out of order ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("no names")
    if other := next((n for n, item in value.items() if not _is_named_tensor(n, item)), None):
        raise ValueError(f"{other!r} is not a tensor")
    return value


def _is_named_tensor(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)


class _Parser:
    """Stack, marks and memo of a pickle machine that never calls anything."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def follow(self, opcode: str, argument: Any) -> None:
        """Apply an opcode; raises ValueError for one that tensors do not need."""
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
        """Return what an opcode pushes onto the stack."""
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
    """Return what calling a global would return, for the few that tensors need."""
    if isinstance(name, _Global) and isinstance(arguments, tuple):
        match name:
            case "collections OrderedDict" if arguments == ():
                return {}
            case "torch._utils _rebuild_tensor_v2":
                return _tensor(*arguments[:4])
            case "torch._utils _rebuild_parameter" if isinstance(arguments[0], Tensor):
                return arguments[0]
    raise ValueError(str(name).replace(" ", "."))


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any) -> Tensor:
    numbers = (offset, *shape, *strides)
    if not isinstance(storage, Storage):
        raise ValueError("a tensor without storage")
    if not all(type(number) is int and 0 <= number <= _MAX_INTEGER for number in numbers):
        raise ValueError("a tensor with an impossible shape")
    if len(shape) != len(strides):
        raise ValueError("a tensor with an impossible shape")
    return Tensor(storage, offset, tuple(shape), tuple(strides))

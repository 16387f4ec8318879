"""What a PyTorch `.bin` file says of its tensors: a pickle, read without running it.

`pickletools.genops` takes a pickle apart and executes nothing. Those opcodes are followed that
PyTorch writes for tensors by name, on a stack of plain values; any other refuses the file.

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
_LARGEST = 2**62


class Storage(NamedTuple):
    """Numbers that tensors are made of."""

    dtype: np.dtype
    key: str
    """Name of its entry under `data/`."""


class Tensor(NamedTuple):
    """Where a tensor's numbers stand in its storage."""

    storage: Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class _Name(str):
    """Module and name of a Python object, which is not looked up."""


def tensors_in(pickled: bytes) -> dict[str, Tensor]:
    """The tensors that a pickle describes, by name.

    Raises:
        ValueError: it is damaged, or describes anything else.
    """
    reader = _Reader()
    try:
        for opcode, argument, _ in pickletools.genops(pickled):
            reader.follow(opcode.name, argument)
        (found,) = reader.stack
    except (IndexError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"out of order ({error})") from None
    if not isinstance(found, dict):
        raise ValueError("no names")
    if stranger := next((n for n, value in found.items() if not _is_named(n, value)), None):
        raise ValueError(f"{stranger!r} is no tensor")
    return found


def _is_named(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, Tensor)


class _Reader:
    """The stack, marks and memo of a pickle being followed."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def follow(self, opcode: str, argument: Any) -> None:
        """Do what an opcode says; raises ValueError for one that tensors do not need."""
        match opcode:
            case "PROTO" | "STOP":
                pass
            case "MARK":
                self._marks.append(len(self.stack))
            case "BINPUT" | "LONG_BINPUT":
                self._memo[argument] = self.stack[-1]
            case "BUILD":  # versions of modules, which an OrderedDict carries along
                self._pop(1)
            case "SETITEM":
                self._set_items(self._pop(2))
            case "SETITEMS":
                self._set_items(self._since_mark())
            case _:
                self.stack.append(self._value(opcode, argument))

    def _value(self, opcode: str, argument: Any) -> Any:
        """What an opcode puts on the stack."""
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
                return tuple(self._since_mark())
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                return tuple(self._pop(int(opcode[-1])))
            case "GLOBAL":
                return _Name(argument)
            case "BINPERSID":
                return _storage(*self._pop(1))
            case "REDUCE":
                return _made(*self._pop(2))
        raise ValueError(f"it holds {opcode}")

    def _pop(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise IndexError("a value is missing")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def _since_mark(self) -> list[Any]:
        start = self._marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def _set_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, dict):
            raise TypeError("items of no dictionary")
        target.update(zip(values[::2], values[1::2], strict=True))


def _storage(reference: Any) -> Storage:
    kind, name, key, *_ = reference
    if kind != "storage" or name not in _STORAGES or not isinstance(name, _Name):
        raise ValueError(f"a storage {name!r}")
    return Storage(_STORAGES[name], str(key))


def _made(name: Any, arguments: Any) -> Any:
    """What calling the object of a name would give."""
    if isinstance(name, _Name) and isinstance(arguments, tuple):
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
    if not all(type(number) is int and 0 <= number <= _LARGEST for number in numbers):
        raise ValueError("a tensor of no possible shape")
    if len(shape) != len(strides):
        raise ValueError("a tensor of no possible shape")
    return Tensor(storage, offset, tuple(shape), tuple(strides))

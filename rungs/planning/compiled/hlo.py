"""Parser of a compiled program's HLO text, and trip counts of its loops. Instructions of a
computation are in execution order, except inside a fusion, which runs as one."""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import jax

Program: TypeAlias = "str | jax.stages.Compiled | Module"
"""A compiled program, its HLO text, or that parsed."""


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of HLO."""

    module: "Module" = dataclasses.field(repr=False)
    computation: str
    """Name of the computation that it is in."""

    name: str
    shape: str
    """In HLO syntax: `(f32[4,8]{1,0}, u32[])`."""
    opcode: str
    rest: str
    """Operands, attributes, metadata and the backend's configuration."""
    is_root: bool
    """Whether it is the result of its computation."""

    @property
    def attributes(self) -> str:
        """`rest` without the metadata, which may contain arbitrary text."""
        return self.rest.partition(", metadata={")[0]

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        return re.findall(r"%([\w.-]+)", self.rest.partition(")")[0])

    @property
    def inputs(self) -> "list[Instruction]":
        """The operands."""
        return [self.module.find(self.computation, name) for name in self.operands]

    @property
    def is_fusion(self) -> bool:
        """Whether it runs another computation as one kernel. On a GPU a copy may be started this
        way, and run beside other kernels."""
        return self.opcode in ("fusion", "fusion-start")

    @property
    def op_name(self) -> str:
        """Its origin in the traced program; empty if XLA does not say."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """Target of a custom call; empty for other instructions."""
        found = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return found[1] if found else ""

    def attribute(self, name: str) -> str:
        """Return the text after `name=`, or `{}` without that attribute."""
        return self.attributes.partition(f"{name}=")[2] or "{}"

    @property
    def element(self) -> int:
        """Tuple index of a get-tuple-element."""
        return numbers(self.attribute("index"))[0]

    @property
    def number(self) -> int:
        """Argument index of a parameter."""
        return int(self.rest.partition(")")[0])

    @property
    def result(self) -> str:
        """Shape of its result; for an asynchronous start, of the end's result. A start returns
        (operands, results, …): https://openxla.org/xla/async_ops. A copy's returns (result,
        operand, …), and in older compilers (for GPUs, jaxlib before 0.11) an all-reduce's only its
        results."""
        has_only_results = self.opcode == "all-reduce-start" and not self.shape.startswith("((")
        if not self.opcode.endswith("-start") or has_only_results:
            return self.shape
        elements = shapes_in(self.shape)
        return elements[0 if self.opcode == "copy-start" else min(1, len(elements) - 1)]

    def called(self) -> Iterator[tuple[str, str]]:
        """Yield the role and name of each computation that it calls."""
        for role, names in _CALLED.findall(self.attributes):
            for name in re.findall(r"[\w.-]+", names):
                yield role, name

    @property
    def inner(self) -> "list[Instruction]":
        """Instructions of the computations that it calls."""
        return [one for _, name in self.called() for one in self.module.computations[name]]

    @property
    def inner_root(self) -> "Instruction":
        """Instruction whose result a fusion or call returns."""
        return next(one for one in self.inner if one.is_root)

    def __str__(self) -> str:
        return f"{self.name} ({self.op_name})"


_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|(?:true|false|branch|called)_computations?)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.-]+)\s*(?:\(.*->.*)?\{$")
_TILED = re.compile(r"(\w+)\[([^\]]*)\](?:\{([\d,]*)(?::(?:T\(([\d,]*)\))?[^}]*)?\})?")
_INSTRUCTION = re.compile(r"(ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")


@dataclasses.dataclass
class Module:
    """A parsed program."""

    computations: dict[str, list[Instruction]]
    entry: str
    devices: int
    is_scheduled: bool

    @classmethod
    def parse(cls, program: Program) -> "Module":
        """Parse a program. Raises ValueError if the text has no ENTRY computation."""
        if isinstance(program, Module):
            return program
        text = program if isinstance(program, str) else program.as_text() or ""
        header = text.lstrip().partition("\n")[0]
        counts = re.findall(r"(?:replica_count|num_partitions)=(\d+)", header)
        module = cls({}, "", math.prod(map(int, counts)), "is_scheduled=true" in header)
        current = ""
        # a kernel's attributes may span lines, in quotes and in braces at the start of a line
        joined = re.sub(r"\n(?=\s*(?:\"|\}[^\n]))", " ", text)
        for line in map(str.strip, joined.splitlines()):
            if instruction := _INSTRUCTION.match(line):
                root, name, shape, opcode, rest = instruction.groups()
                found = Instruction(module, current, name, shape, opcode, rest, bool(root))
                module.computations[current].append(found)
            elif opening := _HEADER.match(line):
                current = opening[2]
                module.computations[current] = []
                module.entry = current if opening[1] else module.entry
        if not module.entry:
            raise ValueError("no HLO of a compiled program: it has no ENTRY computation")
        return module

    def instructions(self) -> Iterator[Instruction]:
        """Yield the instructions of all computations."""
        return itertools.chain.from_iterable(self.computations.values())

    def find(self, computation: str, name: str) -> Instruction:
        """Return an instruction by its name."""
        return next(one for one in self.computations[computation] if one.name == name)

    def root(self, computation: str) -> Instruction:
        """Return the instruction whose result a computation returns."""
        return next(one for one in self.computations[computation] if one.is_root)


def shapes_in(shape: str) -> list[str]:
    """Return the shapes in a tuple, or the shape itself if it is an array."""
    if not shape.startswith("("):
        return [shape]
    depth, elements = 0, [""]
    for character in shape[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += character
    return elements


def bytes_of(shape: str) -> int:
    """Return the bytes of a shape, summed over a tuple. Raises ValueError for an unknown dtype."""
    arrays = re.findall(r"(\w+)\[([^\]]*)\]", shape)
    sizes = ((dtype_bits(dtype), math.prod(numbers(inside))) for dtype, inside in arrays)
    return sum(-(-bits * size // 8) for bits, size in sizes)


def tiled_bytes_of(shape: str) -> int:
    """Return the bytes of a shape in memory, with the padding of a TPU's tiles: rows of 64 elements
    in `f32[8,64]{1,0:T(8,128)}` take as much as 128."""
    return sum(
        -(-dtype_bits(dtype) * math.prod(_padded(numbers(dimensions), order, tile)) // 8)
        for dtype, dimensions, order, tile in _TILED.findall(shape)
    )


def _padded(dimensions: list[int], order: str, tile: str) -> list[int]:
    """Return the dimensions rounded up to whole tiles. `order` is that of the axes in memory, minor
    first; `tile` has its sides along the last axes."""
    sides = [int(side) for side in reversed(tile.split(",")) if side]
    for axis, side in zip(map(int, filter(None, order.split(","))), sides, strict=False):
        dimensions[axis] = -(-dimensions[axis] // side) * side
    return dimensions


def device_bytes_of(shape: str) -> int:
    """Return the bytes, with padding, of the arrays of a shape in the device's main memory: others,
    in fast memory (VMEM, SMEM) or on the host, have a memory space, as in `f32[8]{0:S(1)}`."""
    return tiled_bytes_of(re.sub(r"\w+\[[^\]]*\]\{[^}]*S\([1-9]\d*\)[^}]*\}", "", shape))


def dimensions_of(array: str) -> list[int]:
    """Return the dimensions of an array's shape; for a dynamic one, such as `<=8`, the maximum."""
    return numbers(array.partition("[")[2].partition("]")[0])


def numbers(text: str) -> list[int]:
    """Return the integers in a text."""
    return [int(number) for number in re.findall(r"\d+", text)]


def dtype_bits(array: str) -> int:
    """Return the bits per element of an array's shape: the first number in dtypes such as
    `f8e4m3fn`. Raises ValueError if the width is unknown."""
    dtype = array.partition("[")[0].rpartition("/")[2]
    if dtype in ("pred", "token"):
        return {"pred": 8, "token": 0}[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)
    if not width:
        raise ValueError(f"{dtype}: HLO dtype of unknown width")
    return int(width[1])


_COPIES = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape")


class _Counter(NamedTuple):
    """An integer that a loop computes from its carry."""

    carried: int | None
    """Index in the carry of the number that `constant` is added to, or None."""
    constant: int


_Known = dict[str, _Counter | None]
"""Values of a called computation's parameters, by name; None if unknown."""


def trip_count(one: Instruction) -> int | None:
    """Return how often a called computation runs: the iterations of a loop, None if unknown; 1 for
    other instructions. XLA's CPU and GPU compilers write a loop's count (`known_trip_count`). For
    TPUs it follows from the loop, which counts from a constant in constant steps while a comparison
    with a constant is true."""
    if one.opcode != "while":
        return 1
    if known := re.search(r"known_trip_count\W+n\W+(\d+)", one.rest):
        return int(known[1])
    roles = {role: one.module.root(name) for role, name in one.called()}
    compared = _comparison(roles["condition"], {})
    if compared is None:
        return None
    direction, left, right = compared
    if (index := left.carried) is None or right.carried is not None:
        return None
    first, after = _element(one.inputs[0], index, {}), _element(roles["body"], index, {})
    if first is None or first.carried is not None or after is None or after.carried != index:
        return None
    return _steps(direction, first.constant, right.constant - left.constant, after.constant)


def _steps(direction: str, first: int, limit: int, step: int) -> int | None:
    """Return the iterations of a counter from `first` in steps of `step` while the comparison
    holds; None if it does not count towards its limit."""
    if direction == "NE":
        steps, rest = divmod(limit - first, step) if step else (-1, 0)
        return steps if steps >= 0 and not rest else None
    distance, stride = (
        (limit - first, step) if direction in ("LT", "LE") else (first - limit, -step)
    )
    if stride <= 0 or direction == "EQ":
        return None
    return max(-(-(distance + (direction in ("LE", "GE"))) // stride), 0)


def _comparison(root: Instruction, known: _Known) -> tuple[str, _Counter, _Counter] | None:
    """Return the direction and both sides of the comparison that a computation returns."""
    if root.opcode in ("fusion", "call"):
        return _comparison(root.inner_root, _arguments(root, known))
    if root.opcode != "compare":
        return None
    left, right = (_value(operand, known) for operand in root.inputs)
    direction = re.match(r"[A-Z]+", root.attribute("direction"))
    return None if left is None or right is None or not direction else (direction[0], left, right)


def _value(one: Instruction, known: _Known) -> _Counter | None:
    """Return the value of an integer; None if it depends on more than one number of the carry."""
    if one.opcode == "parameter":
        return known.get(one.name)
    if one.opcode == "constant":
        number = re.match(r"-?\d+(?=\))", one.rest)
        return _Counter(None, int(number[0])) if number else None
    if one.opcode in _COPIES:
        return _value(one.inputs[0], known)
    if one.opcode in ("add", "subtract"):
        left, right = (_value(operand, known) for operand in one.inputs)
        return _sum(left, right, 1 if one.opcode == "add" else -1)
    if one.opcode in ("fusion", "call"):
        return _value(one.inner_root, _arguments(one, known))
    if one.opcode == "get-tuple-element":
        return _element(one.inputs[0], one.element, known)
    return None


def _element(one: Instruction, index: int, known: _Known) -> _Counter | None:
    """Return an integer in a tuple. A loop's unknown parameter, unlike a fusion's, is the carry."""
    if one.opcode == "parameter" and not known:
        return _Counter(index, 0)
    return _value(one.inputs[index], known) if one.opcode == "tuple" else None


def _arguments(call: Instruction, known: _Known) -> _Known:
    """Return the parameter values of the computation that an instruction calls."""
    parameters = [one for one in call.inner if one.opcode == "parameter"]
    return {one.name: _value(call.inputs[one.number], known) for one in parameters}


def _sum(left: _Counter | None, right: _Counter | None, sign: int) -> _Counter | None:
    if left is None or right is None:
        return None
    constant = left.constant + sign * right.constant
    if right.carried is None:
        return _Counter(left.carried, constant)
    return _Counter(right.carried, constant) if left.carried is None and sign == 1 else None

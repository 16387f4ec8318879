"""What the devices of a compiled program send each other, read from its HLO text.

`collectives(compiled)` lists every collective operation: its groups of devices, its bytes, and how
many times it runs in one run of the program. `summary` adds them up by mesh axes. XLA may add
collectives that no line of the source asks for, so only the compiled program shows what it sends.

A device's number is its position in the program's device assignment, which is
`mesh.devices.flat`. XLA calls it a partition id, or a global device id where an operation has
`use_global_device_ids`. The two are the same in a program of one replica, and `jax.jit` compiles
no other.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from numpy.typing import NDArray

Groups = tuple[tuple[int, ...], ...]
"""Numbers of the devices in each group."""

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
UNCOUNTED_KINDS = ("collective-broadcast", "ragged-all-to-all", "send")


class Collective(NamedTuple):
    """A collective operation, as each device runs it."""

    kind: str
    """One of KINDS, also for an asynchronous form."""
    groups: Groups
    """For a collective-permute the pairs (source, target), without those of a device with
    itself."""
    result_bytes: int
    """On one device, all results together."""
    trips: int
    """How many times it runs in one run of the program."""
    op_name: str
    """Where in the traced program it comes from; empty if XLA does not say."""

    @property
    def group_size(self) -> int:
        """Devices in the largest group."""
        return max(map(len, self.groups))

    @property
    def operand_bytes(self) -> int:
        """On one device, all operands together."""
        if self.kind == "all-gather":
            return self.result_bytes // self.group_size
        if self.kind == "reduce-scatter":
            return self.result_bytes * self.group_size
        return self.result_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that one device sends each time it runs."""
        array_bytes = max(self.operand_bytes, self.result_bytes)
        return moved_bytes(self.kind, array_bytes, self.group_size)

    @property
    def total_moved_bytes(self) -> int:
        """Bytes that one device sends in one run of the program."""
        return self.trips * self.moved_bytes


def moved_bytes(kind: str, array_bytes: int, devices: int) -> int:
    """Return the bytes that one device sends in a collective, rounded up.

    Assumes the algorithms that send least: a ring for all-reduce, which is a reduce-scatter and
    then an all-gather (Patarasuk and Yuan 2009, https://doi.org/10.1016/j.jpdc.2008.09.002), and
    for those two by themselves (Chan et al. 2007, https://doi.org/10.1002/cpe.1206). In an
    all-to-all each device sends the others their shares directly.

    Args:
        array_bytes: size of the complete array, of which each device has a shard before or after.
        devices: in a group.
    """
    if kind == "collective-permute":
        return array_bytes
    passes = 2 if kind == "all-reduce" else 1
    return math.ceil(passes * array_bytes * (devices - 1) / devices)


class Traffic(NamedTuple):
    """All collectives of one kind along the same mesh axes, in one run of the program."""

    kind: str
    axes: tuple[str, ...]
    runs: int
    moved_bytes: int
    """Sent by one device."""


def collectives(program: str | jax.stages.Compiled) -> list[Collective]:
    """Return the collectives of a compiled program, one entry for each call site.

    Each branch of a conditional counts as if it always ran. Collectives within a single device
    send nothing and are left out.

    Raises:
        ValueError: a loop contains a collective and XLA does not know its trip count, or the text
            has a collective or a syntax that this module cannot count.
    """
    text = program if isinstance(program, str) else program.as_text() or ""
    module = _Module.parse(text)
    return list(_collectives_in(module, module.entry))


def summary(found: Iterable[Collective], mesh: Mesh | AbstractMesh) -> list[Traffic]:
    """Return runs and bytes by kind and mesh axes, sorted by these."""
    grouped: dict[tuple[str, tuple[str, ...]], list[Collective]] = defaultdict(list)
    for collective in found:
        grouped[collective.kind, axes_of(collective.groups, mesh)].append(collective)
    return [
        Traffic(kind, axes, sum(c.trips for c in group), sum(c.total_moved_bytes for c in group))
        for (kind, axes), group in sorted(grouped.items())
    ]


def axes_of(groups: Groups, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ, in the mesh's order.

    Raises:
        ValueError: a device number is outside the mesh.
    """
    shape = tuple(mesh.shape.values())
    places = [np.unravel_index(group, shape) for group in groups]
    return tuple(
        name
        for axis, name in enumerate(mesh.axis_names)
        if any(np.ptp(place[axis]) > 0 for place in places)
    )


class _Instruction(NamedTuple):
    name: str
    shape: str
    """As HLO writes it: `(f32[4,8]{1,0}, u32[])`."""
    opcode: str
    rest: str
    """Operands, attributes, metadata and the backend's configuration."""

    @property
    def attributes(self) -> str:
        """`rest` without the metadata, which may contain any text."""
        return self.rest.partition(", metadata={")[0]

    @property
    def op_name(self) -> str:
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1] if found else ""

    @property
    def known_trips(self) -> int | None:
        """Trip count of a loop, if XLA knows it."""
        found = re.search(r"known_trip_count\W+n\W+(\d+)", self.rest)
        return int(found[1]) if found else None

    def __str__(self) -> str:
        return f"{self.name} ({self.op_name})"


_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.-]+)\s*(?:\(.*->.*)?\{$")
_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")


class _Module(NamedTuple):
    """A parsed program."""

    computations: dict[str, list[_Instruction]]
    entry: str
    devices: int

    @classmethod
    def parse(cls, text: str) -> Self:
        computations: dict[str, list[_Instruction]] = {}
        entry, current = "", ""
        for line in map(str.strip, text.splitlines()):
            if instruction := _INSTRUCTION.match(line):
                computations[current].append(_Instruction(*instruction.groups()))
            elif header := _HEADER.match(line):
                current = header[2]
                computations[current] = []
                entry = current if header[1] else entry
        if not entry:
            raise ValueError("no HLO of a compiled program: it has no ENTRY computation")
        counts = re.findall(r"(?:replica_count|num_partitions)=(\d+)", text.lstrip().split("\n")[0])
        return cls(computations, entry, math.prod(map(int, counts)))


def _collectives_in(module: _Module, computation: str) -> Iterator[Collective]:
    """Yield the collectives of a computation and of everything that it calls."""
    for instruction in module.computations[computation]:
        yield from _collective(instruction, module.devices)
        for called, trips in _calls(instruction):
            for inner in _collectives_in(module, called):
                if trips is None:
                    raise ValueError(
                        f"{instruction}: XLA does not know how many times this loop runs, and it"
                        f" contains {inner.kind} ({inner.op_name})"
                    )
                yield inner._replace(trips=trips * inner.trips)


_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|(?:true|false|branch|called)_computations?)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)


def _calls(instruction: _Instruction) -> Iterator[tuple[str, int | None]]:
    """Yield the computations that an instruction calls, and how many times (None if unknown).

    The start and the end of an asynchronous operation may both name its computation. Only the
    start counts.
    """
    if instruction.opcode.endswith(("-update", "-done")):
        return
    trips = instruction.known_trips if instruction.opcode == "while" else 1
    for role, names in _CALLED.findall(instruction.attributes):
        for name in re.findall(r"[\w.-]+", names):
            yield name, trips if trips is None else trips + (role == "condition")


def _collective(instruction: _Instruction, devices: int) -> Iterator[Collective]:
    """Yield the instruction as a collective, if it is one that involves several devices."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in UNCOUNTED_KINDS and "is_host_transfer=true" not in instruction.attributes:
        raise ValueError(f"{instruction}: the bytes of a {kind} cannot be counted")
    if kind not in KINDS:
        return
    if kind == "collective-permute":
        pairs = _numbers_in_braces(_attribute(instruction, "source_target_pairs"))
        groups = tuple(pair for pair in pairs if pair[0] != pair[1])
    else:
        groups = _groups(_attribute(instruction, "replica_groups"), devices)
    if any(len(group) > 1 for group in groups):
        yield Collective(kind, groups, _bytes(_result(instruction)), 1, instruction.op_name)


def _result(instruction: _Instruction) -> str:
    """Return the shape of a collective's result.

    An asynchronous start returns (operands, results, …), except that of an all-reduce:
    https://openxla.org/xla/async_ops.
    """
    elements = _elements(instruction.shape)
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        return elements[min(1, len(elements) - 1)]
    return instruction.shape


def _elements(shape: str) -> list[str]:
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


def _bytes(shape: str) -> int:
    """Return the bytes of a shape, all arrays of a tuple together."""
    arrays = re.findall(r"(\w+)\[([^\]]*)\]", shape)
    return sum(-(-_bits(dtype) * _size(dimensions) // 8) for dtype, dimensions in arrays)


def _bits(dtype: str) -> int:
    """Return the bits of an element: the first number in names such as `f8e4m3fn`."""
    if dtype in ("pred", "token"):
        return {"pred": 8, "token": 0}[dtype]
    width = re.match(r"[a-z]+(\d+)", dtype)
    if not width:
        raise ValueError(f"{dtype}: HLO dtype of unknown width")
    return int(width[1])


def _size(dimensions: str) -> int:
    """Return the number of elements; of a dynamic dimension, `<=8`, its maximum."""
    return math.prod(int(number) for number in re.findall(r"\d+", dimensions))


def _attribute(instruction: _Instruction, name: str) -> str:
    """Return the text after `name=`, or `{}` if the instruction does not have it."""
    return instruction.attributes.partition(f"{name}=")[2] or "{}"


_DIMENSIONS = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA = re.compile(r"\[([\d,]+)\]<=" + _DIMENSIONS)
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}")


def _groups(text: str, devices: int) -> Groups:
    """Parse the groups after `replica_groups=`, in any of the three forms that XLA writes.

    `{{0,1},{2,3}}`, where `{}` means all devices; `[2,2]<=[4]`; and `mesh['a'=2,'b'=2] {'b'}`:
    https://github.com/openxla/xla/blob/main/xla/hlo/ir/replica_group.h.
    """
    if text.startswith("{}"):
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return _numbers_in_braces(text)
    if iota := _IOTA.match(text):
        return _as_groups(_iota(iota[2], iota[3]).reshape(_numbers(iota[1])))
    if mesh := _MESH.match(text):
        return _mesh_groups(*mesh.groups(default=""))
    raise ValueError(f"replica_groups={text[:80]}: unknown form of groups")


def _mesh_groups(axes: str, device_ids: str, grouped: str) -> Groups:
    """Return groups of the devices that differ only in the grouped mesh axes, in mesh order.

    Args:
        axes: as in `'a'=2,'b'=4`.
        device_ids: of the mesh, as in `[4,2]T(1,0)` or `1,0,2,…`; in order if empty.
        grouped: as in `'a','b':(2)3`: all of axis a, and of axis b a factor of 3 that follows a
            factor of 2.
    """
    sizes = {name: int(size) for name, size in re.findall(r"([^',=]+)'?=(\d+)", axes)}
    places = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    for name, before, part in re.findall(r"([^',:]+)'?(?::\((\d+)\)(\d+))?", grouped):
        part_size = int(part or sizes[name])
        stride = sizes[name] // (int(before or 1) * part_size)
        places[name] = places[name] - places[name] // stride % part_size * stride
    group_of = np.ravel_multi_index(tuple(places.values()), tuple(sizes.values())).ravel()
    numbers = _device_ids(device_ids, group_of.size)
    return _as_groups(numbers[group_of == group] for group in np.unique(group_of))


def _device_ids(text: str, count: int) -> NDArray[np.int64]:
    if iota := re.match(_DIMENSIONS, text):
        return _iota(iota[1], iota[2])
    return np.array(_numbers(text)) if text else np.arange(count)


def _iota(dimensions: str, order: str | None) -> NDArray[np.int64]:
    """Return 0, 1, 2, … as an array of these dimensions, transposed and then flattened."""
    shape = _numbers(dimensions)
    array = np.arange(math.prod(shape)).reshape(shape)
    return array.transpose(_numbers(order) if order else None).ravel()


def _as_groups(rows: Iterable[NDArray[np.int64]]) -> Groups:
    return tuple(tuple(row.tolist()) for row in rows)


def _numbers_in_braces(text: str) -> Groups:
    """Parse the groups at the start of a text such as `{{0,1},{2,3}}, …`."""
    outer = re.match(r"\{(?:\{[\d,]*\},?)*\}", text)
    if not outer:
        raise ValueError(f"{text[:80]}: unknown form of groups")
    return tuple(_numbers(inner) for inner in re.findall(r"\{([\d,]*)\}", outer[0]))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))

"""What the HLO text of a compiled program says: its instructions, the collectives that it runs with
the bytes that they send, and its handwritten kernels. A device's number is its position in
`mesh.devices.flat`, XLA's partition id, as `jax.jit` compiles programs of one replica."""

import itertools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh
from numpy.typing import NDArray

Program: TypeAlias = "str | jax.stages.Compiled"
"""A compiled program or its HLO text."""
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
CONTROL_FLOW = ("while", "conditional", "call")
"""Opcodes that run other computations."""
KERNEL_PARTS = "attention", "experts", "loss"
"""Parts of the model with kernels, as `jax.named_scope`s, which XLA keeps in operation names."""
XLA = "XLA"
"""Name shown for a part without kernels."""
Groups = tuple[tuple[int, ...], ...]
"""Numbers of the devices in each group."""
_UNCOUNTED = ("collective-broadcast", "ragged-all-to-all", "send")
_UNCOUNTED_FUSIONS = re.compile("AllReduceScatterFusion|AsyncCollectiveStart")
"""In which XLA's TPU compiler spreads one collective over several instructions."""
_MAKERS = {
    "__cudnn$fmha": "cuDNN",
    "__gpu$xla.gpu.triton": "Pallas for Triton",
    "mosaic_gpu": "Pallas for Mosaic GPU",
    "tpu_custom_call": "Pallas for Mosaic",
}
"""Origin of a kernel by the prefix of its custom call's target."""
_CALLED = re.compile(
    r"\b(body|condition|calls|to_apply|(?:true|false|branch|called)_computations?)="
    r"(\{[^}]*\}|%?[\w.-]+)"
)
_HEADER = re.compile(r"(ENTRY\s+)?%?([\w.-]+)\s*(?:\(.*->.*)?\{$")
_INSTRUCTION = re.compile(r"(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"mesh\[((?:'\w+'=\d+,?)+)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))?"
    r" \{((?:'\w+',?)+)\}"
)


class Instruction(NamedTuple):
    """One line of HLO."""

    name: str
    shape: str
    """In HLO syntax: `(f32[4,8]{1,0}, u32[])`."""
    opcode: str
    rest: str
    """Operands, attributes, metadata and the backend's configuration."""

    @property
    def attributes(self) -> str:
        """`rest` without the metadata, which may contain arbitrary text."""
        return self.rest.partition(", metadata={")[0]

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

    def called(self) -> Iterator[tuple[str, str]]:
        """Yield the role and name of each computation that it calls."""
        for role, names in _CALLED.findall(self.attributes):
            for name in re.findall(r"[\w.-]+", names):
                yield role, name

    def __str__(self) -> str:
        return f"{self.name} ({self.op_name})"


class Module(NamedTuple):
    """A parsed program."""

    computations: dict[str, list[Instruction]]
    """In execution order, except inside fusions, which run as one."""
    entry: str
    devices: int

    @classmethod
    def parse(cls, program: Program) -> "Module":
        """Parse a program. Raises ValueError if the text has no ENTRY computation."""
        text = program if isinstance(program, str) else program.as_text() or ""
        header = text.lstrip().partition("\n")[0]
        counts = re.findall(r"(?:replica_count|num_partitions)=(\d+)", header)
        computations: dict[str, list[Instruction]] = {}
        current = entry = ""
        # a kernel's attributes may span lines, in quotes and in braces at the start of a line
        joined = re.sub(r"\n(?=\s*(?:\"|\}[^\n]))", " ", text)
        for line in map(str.strip, joined.splitlines()):
            if instruction := _INSTRUCTION.match(line):
                computations[current].append(Instruction(*instruction.groups()))
            elif opening := _HEADER.match(line):
                current = opening[2]
                computations[current] = []
                entry = current if opening[1] else entry
        if not entry:
            raise ValueError("no HLO of a compiled program: it has no ENTRY computation")
        return cls(computations, entry, math.prod(map(int, counts)))

    def instructions(self) -> Iterator[Instruction]:
        """Yield the instructions of all computations."""
        return itertools.chain.from_iterable(self.computations.values())

    def inside(self, one: Instruction) -> list[Instruction]:
        """Return the instructions of the computations that an instruction calls."""
        return [inner for _, name in one.called() for inner in self.computations[name]]


def trip_count(one: Instruction) -> int | None:
    """Return how often a called computation runs: the iterations of a loop, None if XLA does not
    write them, as for TPUs; 1 for other instructions."""
    known = re.search(r"known_trip_count\W+n\W+(\d+)", one.rest)
    if one.opcode != "while":
        return 1
    return int(known[1]) if known else None


def bytes_of(shape: str) -> int:
    """Return the bytes of a shape, summed over a tuple. Raises ValueError for an unknown dtype."""
    arrays = re.findall(r"(\w+)\[([^\]]*)\]", shape)
    sizes = ((_bits_of(dtype), math.prod(_numbers(inside))) for dtype, inside in arrays)
    return sum(-(-bits * size // 8) for bits, size in sizes)


def _bits_of(dtype: str) -> int:
    """Return the bits per element: the first number in dtypes such as `f8e4m3fn`."""
    if dtype in ("pred", "token"):
        return {"pred": 8, "token": 0}[dtype]
    if width := re.match(r"[a-z]+(\d+)", dtype):
        return int(width[1])
    raise ValueError(f"{dtype}: HLO dtype of unknown width")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


class Collective(NamedTuple):
    """A collective operation, as each device runs it."""

    kind: str
    """One of KINDS."""
    groups: Groups
    """Groups of devices; for a collective-permute, pairs (source, target) of different devices."""
    result_bytes: int
    """Bytes of all results on one device."""
    trips: int
    """Number of executions per run of the program."""
    op_name: str
    """Its origin in the traced program; empty if XLA does not say."""

    @property
    def group_size(self) -> int:
        """Devices in the largest group."""
        return max(map(len, self.groups))

    @property
    def operand_bytes(self) -> int:
        """Bytes of all operands on one device."""
        if self.kind == "all-gather":
            return self.result_bytes // self.group_size
        if self.kind == "reduce-scatter":
            return self.result_bytes * self.group_size
        return self.result_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes that one device sends per execution."""
        array_bytes = max(self.operand_bytes, self.result_bytes)
        return moved_bytes(self.kind, array_bytes, self.group_size)

    @property
    def total_moved_bytes(self) -> int:
        """Bytes that one device sends per run of the program."""
        return self.trips * self.moved_bytes


class Traffic(NamedTuple):
    """All collectives of one kind along the same mesh axes, per run of the program."""

    kind: str
    axes: tuple[str, ...]
    runs: int
    moved_bytes: int
    """Bytes that one device sends."""


def moved_bytes(kind: str, array_bytes: int, devices: int) -> int:
    """Return the bytes that one device sends in a collective, rounded up, with the algorithms that
    send least: a ring for all-reduce (a reduce-scatter, then an all-gather; Patarasuk and Yuan
    2009, https://doi.org/10.1016/j.jpdc.2008.09.002) and for those two (Chan et al. 2007,
    https://doi.org/10.1002/cpe.1206); in an all-to-all each device sends shares directly.
    `array_bytes` is the size of the complete array, of which each of the group's `devices` has a
    shard before or after."""
    if kind == "collective-permute":
        return array_bytes
    passes = 2 if kind == "all-reduce" else 1
    return math.ceil(passes * array_bytes * (devices - 1) / devices)


def collectives(program: Program) -> list[Collective]:
    """Return the collectives of a compiled program, one entry per call site. All branches of a
    conditional count. Collectives within a single device are left out. Raises ValueError if a loop
    with a collective has no known trip count, or this module can't count a collective, as often in
    programs for GPUs and TPUs."""
    module = Module.parse(program)
    return list(_collectives_in(module, module.entry))


def _collectives_in(module: Module, computation: str) -> Iterator[Collective]:
    for one in module.computations[computation]:
        if found := _collective(one, module.devices):
            yield found
        if one.opcode.endswith(("-update", "-done")):  # the start has named the computation
            continue
        trips = trip_count(one)
        for role, name in one.called():
            for inner in _collectives_in(module, name):
                if trips is None:
                    raise ValueError(
                        f"{one}: XLA does not know how many times this loop runs, and it contains"
                        f" {inner.kind} ({inner.op_name})"
                    )
                times = trips + (role == "condition")
                yield inner._replace(trips=times * inner.trips)


def _collective(one: Instruction, devices: int) -> Collective | None:
    """Return the instruction as a collective, if it is one with several devices."""
    kind = one.opcode.removesuffix("-start")
    is_started = kind in KINDS and kind != one.opcode  # as in programs for GPUs
    is_uncounted = kind in _UNCOUNTED and "is_host_transfer=true" not in one.attributes
    if is_started or is_uncounted or _UNCOUNTED_FUSIONS.search(one.attributes):
        raise ValueError(f"{one}: the bytes of this {one.opcode} cannot be counted")
    if kind not in KINDS:
        return None
    if kind == "collective-permute":
        pairs = _parse_braces(one.attribute("source_target_pairs"))
        groups = tuple(pair for pair in pairs if pair[0] != pair[1])
    else:
        groups = parse_groups(one.attribute("replica_groups"), devices)
    if all(len(group) < 2 for group in groups):
        return None
    return Collective(kind, groups, bytes_of(one.shape), 1, one.op_name)


def parse_groups(text: str, devices: int) -> Groups:
    """Parse the groups after `replica_groups=`, in one of XLA's three forms: `{{0,1},{2,3}}`, where
    `{}` means all devices; `[2,2]<=[4]`, possibly transposed; or `mesh['a'=2,'b'=2] {'b'}`,
    which may say in which order the mesh has the devices
    (https://github.com/openxla/xla/blob/main/xla/hlo/ir/replica_group.h). Raises ValueError for
    another form."""
    if text.startswith("{}"):
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return _parse_braces(text)
    if iota := _IOTA.match(text):
        return _as_groups(_device_ids(devices, *iota.groups()[1:]).reshape(_numbers(iota[1])))
    if mesh := _MESH.match(text):
        sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh[1])}
        grouped = [list(sizes).index(name) for name in re.findall(r"'([^']+)'", mesh[4])]
        ids = _device_ids(devices, *mesh.groups()[1:3]).reshape(tuple(sizes.values()))
        last = np.moveaxis(ids, grouped, range(-len(grouped), 0))
        return _as_groups(last.reshape(-1, math.prod(ids.shape[axis] for axis in grouped)))
    raise ValueError(f"replica_groups={text[:80]}: unknown form of groups")


def _device_ids(devices: int, shape: str | None, order: str | None) -> NDArray[np.int64]:
    ids = np.arange(devices).reshape(_numbers(shape or str(devices)))
    return ids.transpose(_numbers(order or "") or None)


def _parse_braces(text: str) -> Groups:
    outer = re.match(r"\{(?:\{[\d,]*\},?)*\}", text)
    if not outer:
        raise ValueError(f"{text[:80]}: unknown form of groups")
    return tuple(tuple(_numbers(inner)) for inner in re.findall(r"\{([\d,]*)\}", outer[0]))


def _as_groups(rows: NDArray[np.int64]) -> Groups:
    return tuple(map(tuple, rows.tolist()))


def summary(found: Iterable[Collective], mesh: Mesh | AbstractMesh) -> list[Traffic]:
    """Return executions and bytes by kind and mesh axes, sorted by these."""
    runs: Counter[tuple[str, tuple[str, ...]]] = Counter()
    sent: dict[tuple[str, tuple[str, ...]], int] = defaultdict(int)
    for one in found:
        key = one.kind, axes_of(one.groups, mesh)
        runs[key] += one.trips
        sent[key] += one.total_moved_bytes
    return [Traffic(*key, runs[key], sent[key]) for key in sorted(runs)]


def axes_of(groups: Groups, mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the mesh axes along which a group's devices differ, in the mesh's order. Raises
    ValueError if a device number is outside the mesh."""
    shape = tuple(mesh.shape.values())
    places = [np.unravel_index(group, shape) for group in groups]
    return tuple(
        name
        for axis, name in enumerate(mesh.axis_names)
        if any(np.ptp(place[axis]) > 0 for place in places)
    )


def kernels_of(program: Program) -> dict[str, dict[str, int]]:
    """Return the calls of handwritten kernels in a program's text, by part of the model and origin;
    parts without any are absent."""
    calls: dict[str, Counter[str]] = {}
    for call in Module.parse(program).instructions():
        maker = next((_MAKERS[start] for start in _MAKERS if call.target.startswith(start)), None)
        scopes = re.findall(r"\w+", call.op_name)
        part = next((part for part in KERNEL_PARTS if part in scopes), None)
        if maker and part:
            calls.setdefault(part, Counter())[maker] += 1
    return {part: dict(counts) for part, counts in calls.items()}

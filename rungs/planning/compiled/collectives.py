"""The collectives of a compiled program, read from its HLO text: their bytes (`collectives`), which
of them run while the device computes (`overlaps`), and sums by mesh axes. A device's number is its
position in `mesh.devices.flat`, XLA's partition id: the global device id in a program of one
replica, as `jax.jit` always compiles."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh
from numpy.typing import NDArray

from rungs.planning.compiled import hlo

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
UNCOUNTED_KINDS = ("collective-broadcast", "ragged-all-to-all", "send")
Groups = tuple[tuple[int, ...], ...]
"""Numbers of the devices in each group."""

_DIMENSIONS = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
_IOTA = re.compile(r"\[([\d,]+)\]<=" + _DIMENSIONS)
_MATMUL_TARGETS = ("__cublas", "__cudnn", "__gpu$xla.gpu.triton", "tpu_custom_call")
"""Prefixes of custom calls that are matmuls, attention or handwritten kernels."""
_MESH = re.compile(r"mesh\[([^\]]*)\](?:, device_ids=\(([^{]*)\))? \{([^}]*)\}")


class Collective(NamedTuple):
    """A collective operation, as each device runs it."""

    kind: str
    """One of KINDS, also for the asynchronous form."""
    groups: Groups
    """Groups of devices; for a collective-permute, pairs (source, target) of different devices."""
    result_bytes: int
    """Bytes of all results on one device."""
    trips: int
    """Number of executions per run of the program."""
    op_name: str
    """Its origin in the traced program; empty if XLA does not say."""
    matmuls: int = 0
    """Matmuls between its start and its end per execution, from `overlaps`; 0 if it is synchronous.
    Attention and other custom kernels count as matmuls."""

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

    @property
    def hidden_bytes(self) -> int:
        """Bytes that one device sends while it computes, per run of the program."""
        return self.total_moved_bytes if self.matmuls else 0


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


class Traffic(NamedTuple):
    """All collectives of one kind along the same mesh axes, per run of the program."""

    kind: str
    axes: tuple[str, ...]
    runs: int
    moved_bytes: int
    """Bytes that one device sends."""
    hidden_bytes: int = 0
    """Bytes sent while the device computes; 0 if `overlaps` didn't count them."""

    @property
    def exposed_bytes(self) -> int:
        """Bytes that the device waits for."""
        return self.moved_bytes - self.hidden_bytes


def collectives(program: hlo.Program) -> list[Collective]:
    """Return the collectives of a compiled program, one entry per call site. All branches of a
    conditional count. Collectives within a single device are left out. Raises ValueError if a loop
    with a collective has no known trip count, or this module can't count a collective or syntax."""
    return [collective for collective, _ in sites(hlo.Module.parse(program))]


def summary(found: Iterable[Collective], mesh: Mesh | AbstractMesh) -> list[Traffic]:
    """Return executions and bytes by kind and mesh axes, sorted by these."""
    grouped: dict[tuple[str, tuple[str, ...]], list[tuple[int, int, int]]] = defaultdict(list)
    for one in found:
        figures = one.trips, one.total_moved_bytes, one.hidden_bytes
        grouped[one.kind, axes_of(one.groups, mesh)].append(figures)
    return [Traffic(*key, *map(sum, zip(*grouped[key], strict=True))) for key in sorted(grouped)]


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


Site = tuple[Collective, hlo.Instruction]
"""A collective and its call, which is in a schedule and never in a fusion; of an asynchronous one
its start."""


def sites(module: hlo.Module, computation: str = "") -> Iterator[Site]:
    """Yield the call sites of collectives in a computation, by default the entry, and in all that
    it calls; errors as in `collectives`."""
    instructions = module.computations[computation or module.entry]
    continues_another = _continues_another(instructions)
    for instruction in instructions:
        collective = None if continues_another else _collective(instruction)
        if collective is not None:
            yield collective, instruction
        for called, trips in _calls(instruction):
            for inner, call in sites(module, called):
                collective = _as_scattered(inner, instruction)
                if trips is None:
                    raise ValueError(
                        f"{instruction}: XLA does not know how many times this loop runs, and it"
                        f" contains {collective.kind} ({collective.op_name})"
                    )
                repeated = collective._replace(trips=trips * collective.trips)
                yield repeated, call if instruction.opcode in CONTROL_FLOW else instruction


def _as_scattered(found: Collective, caller: hlo.Instruction) -> Collective:
    """Return the all-reduce of a TPU's all-reduce-scatter fusion as the reduce-scatter that it is,
    as each device keeps only one part of the sum; others unchanged."""
    if found.kind != "all-reduce" or "AllReduceScatterFusion" not in caller.rest:
        return found
    return found._replace(kind="reduce-scatter", result_bytes=hlo.bytes_of(caller.shape))


CONTROL_FLOW = ("while", "conditional", "call")
"""Opcodes that run other computations by their own schedules."""


def _calls(instruction: hlo.Instruction) -> Iterator[tuple[str, int | None]]:
    """Yield the computations that an instruction calls, and how many times (None if unknown). If
    start and end of an asynchronous operation both name its computation, only the start counts."""
    if not instruction.opcode.endswith(("-update", "-done")):
        trips = hlo.trip_count(instruction)
        for role, name in instruction.called():
            yield name, trips if trips is None else trips + (role == "condition")


def _continues_another(computation: list[hlo.Instruction]) -> bool:
    """Return whether a computation's collective was started in another one. XLA's TPU compiler
    starts it in one fusion, continues it in the fusions of overlapping matmuls, and ends it in
    another; all contain it with the same `chain_id`."""
    has_chain = any(map(_chain_id, computation))
    return has_chain and all(one.target != "AsyncCollectiveStart" for one in computation)


def _chain_id(instruction: hlo.Instruction) -> str:
    """Return the `chain_id` of a collective, empty if it has none."""
    found = re.search(r'chain_id="(\d+)"', instruction.attributes)
    return found[1] if found else ""


def _collective(instruction: hlo.Instruction) -> Collective | None:
    """Return the instruction as a collective, if it is one with several devices."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in UNCOUNTED_KINDS and "is_host_transfer=true" not in instruction.attributes:
        raise ValueError(f"{instruction}: the bytes of a {kind} cannot be counted")
    if kind not in KINDS:
        return None
    if kind == "collective-permute":
        pairs = parse_braces(instruction.attribute("source_target_pairs"))
        groups = tuple(pair for pair in pairs if pair[0] != pair[1])
    else:
        text = instruction.attribute("replica_groups")
        groups = parse_groups(text, instruction.module.devices)
    if all(len(group) < 2 for group in groups):
        return None
    return Collective(kind, groups, hlo.bytes_of(instruction.result), 1, instruction.op_name)


def parse_groups(text: str, devices: int) -> Groups:
    """Parse the groups after `replica_groups=`, in one of XLA's three forms: `{{0,1},{2,3}}`, where
    `{}` means all devices; `[2,2]<=[4]`; or `mesh['a'=2,'b'=2] {'b'}`
    (https://github.com/openxla/xla/blob/main/xla/hlo/ir/replica_group.h). Raises ValueError for
    another form."""
    if text.startswith("{}"):
        return (tuple(range(devices)),)
    if text.startswith("{"):
        return parse_braces(text)
    if iota := _IOTA.match(text):
        return _as_groups(_iota(iota[2], iota[3]).reshape(hlo.numbers(iota[1])))
    if mesh := _MESH.match(text):
        return _mesh_groups(*mesh.groups(default=""))
    raise ValueError(f"replica_groups={text[:80]}: unknown form of groups")


def _mesh_groups(axes: str, device_ids: str, grouped: str) -> Groups:
    """Return groups of devices that differ only in the grouped mesh axes, in mesh order.

    Args:
        axes: as in `'a'=2,'b'=4`.
        device_ids: of the mesh, as in `[4,2]T(1,0)` or `1,0,2,…`; in order if empty.
        grouped: as in `'a','b':(2)3`: all of axis a, and of axis b a factor 3 after a factor 2."""
    sizes = {name: int(size) for name, size in re.findall(r"([^',=]+)'?=(\d+)", axes)}
    places = dict(zip(sizes, np.indices(tuple(sizes.values())), strict=True))
    for name, before, part in re.findall(r"([^',:]+)'?(?::\((\d+)\)(\d+))?", grouped):
        part_size = int(part or sizes[name])
        stride = sizes[name] // (int(before or 1) * part_size)
        places[name] = places[name] - places[name] // stride % part_size * stride
    group_of = np.ravel_multi_index(tuple(places.values()), tuple(sizes.values())).ravel()
    if iota := re.match(_DIMENSIONS, device_ids):
        ids = _iota(iota[1], iota[2])
    else:
        ids = np.array(hlo.numbers(device_ids) if device_ids else range(group_of.size))
    return _as_groups(ids[group_of == group] for group in np.unique(group_of))


def _iota(dimensions: str, order: str | None) -> NDArray[np.int64]:
    """Return 0, 1, 2, … as an array of these dimensions, transposed and flattened."""
    shape = hlo.numbers(dimensions)
    array = np.arange(math.prod(shape)).reshape(shape)
    return array.transpose(hlo.numbers(order) if order else None).ravel()


def _as_groups(rows: Iterable[NDArray[np.int64]]) -> Groups:
    return tuple(tuple(row.tolist()) for row in rows)


def parse_braces(text: str) -> Groups:
    """Parse the groups at the start of a text such as `{{0,1},{2,3}}, …`. May raise ValueError."""
    outer = re.match(r"\{(?:\{[\d,]*\},?)*\}", text)
    if not outer:
        raise ValueError(f"{text[:80]}: unknown form of groups")
    return tuple(tuple(hlo.numbers(inner)) for inner in re.findall(r"\{([\d,]*)\}", outer[0]))


def overlaps(program: hlo.Program) -> list[Collective]:
    """Return the collectives of a compiled program, as `collectives` does, with their `matmuls`.

    A compiled program's text is in execution order. An asynchronous collective is hidden if there
    are matmuls between its start and its end; the device waits for all others. Start and end look
    different in each compiler:

        GPU  all-gather-start … all-gather-done, or async-start … async-done of a computation
        TPU  a fusion with a custom call AsyncCollectiveStart … one with AsyncCollectiveDone; or as
             on a GPU

    Raises ValueError as `collectives` does, or if the program has no schedule, or an asynchronous
    collective no end."""
    module = hlo.Module.parse(program)
    if not module.is_scheduled:
        raise ValueError("the program has no schedule, so it does not say what overlaps")
    return [one._replace(matmuls=_matmuls_during(call)) for one, call in sites(module)]


def _matmuls_during(start: hlo.Instruction) -> int:
    schedule = start.module.computations[start.computation]
    return sum(map(_matmuls_in, _before_end(schedule[schedule.index(start) :])))


def _before_end(schedule: list[hlo.Instruction]) -> list[hlo.Instruction]:
    """Return the instructions between a collective, `schedule`'s first, and its end, if any."""
    first, names = schedule[0], {schedule[0].name}
    is_start = first.opcode.endswith("-start")
    chain = "" if is_start else _chain(first, "AsyncCollectiveStart")
    if not (is_start or chain):
        return []
    for position, instruction in enumerate(schedule):
        if chain and _chain(instruction, "AsyncCollectiveDone") == chain:
            return schedule[1:position]
        if is_start and names.intersection(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return schedule[1:position]
            names.add(instruction.name)  # async-update
    raise ValueError(f"{first}: the end of this collective is not in its computation")


def _chain(instruction: hlo.Instruction, target: str) -> str:
    """Return the chain id of the collective in a fusion with a custom call of this target."""
    inner = instruction.inner if instruction.opcode == "fusion" else []
    has_target = any(one.target == target for one in inner)
    return max(map(_chain_id, inner)) if has_target else ""


def _matmuls_in(instruction: hlo.Instruction) -> int:
    """Return how many matmuls an instruction runs. A loop of unknown length counts once."""
    is_kernel = instruction.target.startswith(_MATMUL_TARGETS)
    if is_kernel or instruction.opcode in ("dot", "convolution"):
        return 1
    trips = hlo.trip_count(instruction)
    return (1 if trips is None else trips) * sum(map(_matmuls_in, instruction.inner))

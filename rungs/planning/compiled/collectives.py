"""What the devices of a compiled program send each other, read from its HLO text.

`collectives(compiled)` lists every collective operation: its groups of devices, its bytes, and how
many times it runs in one run of the program. `summary` adds them up by mesh axes. XLA may add
collectives that no line of the source asks for, so only the compiled program shows what it sends.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from rungs.planning.compiled.hlo import Instruction, Module, Program, bytes_of
from rungs.planning.compiled.hlo_groups import Groups, parse_braces, parse_groups
from rungs.planning.compiled.hlo_trip_count import trip_count

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


def collectives(program: Program) -> list[Collective]:
    """Return the collectives of a compiled program, one entry for each call site.

    Each branch of a conditional counts as if it always ran. Collectives within a single device
    send nothing and are left out.

    Raises:
        ValueError: a loop contains a collective and XLA does not know its trip count, or the text
            has a collective or a syntax that this module cannot count.
    """
    return [site.collective for site in sites(Module.parse(program))]


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


class Site(NamedTuple):
    """Where a collective is called."""

    collective: Collective
    computation: str
    """The one in whose schedule it stands, which is not that of a fusion."""
    position: int
    """In that schedule. Where an asynchronous collective starts."""


def sites(module: Module) -> Iterator[Site]:
    """Yield the call sites of collectives, as `collectives`."""
    return _sites_in(module, module.entry)


def _sites_in(module: Module, computation: str) -> Iterator[Site]:
    """Yield the call sites in a computation and in everything that it calls."""
    instructions = module.computations[computation]
    continues_another = _continues_another(instructions)
    for position, instruction in enumerate(instructions):
        if not continues_another:
            for collective in _collective(instruction, module.devices):
                yield Site(collective, computation, position)
        for called, trips in _calls(module, computation, instruction):
            for inner in _sites_in(module, called):
                inner = _as_scattered(inner, instruction)
                if trips is None:
                    raise ValueError(
                        f"{instruction}: XLA does not know how many times this loop runs, and it"
                        f" contains {inner.collective.kind} ({inner.collective.op_name})"
                    )
                repeated = inner.collective._replace(trips=trips * inner.collective.trips)
                is_scheduled = instruction.opcode in CONTROL_FLOW
                place = inner[1:] if is_scheduled else (computation, position)
                yield Site(repeated, *place)


def _as_scattered(site: Site, caller: Instruction) -> Site:
    """Return the all-reduce of a TPU's all-reduce-scatter fusion, which keeps one part of the sum
    on each device, as the reduce-scatter that it is; other sites unchanged."""
    if site.collective.kind != "all-reduce" or "AllReduceScatterFusion" not in caller.rest:
        return site
    kept = bytes_of(caller.shape)
    scattered = site.collective._replace(kind="reduce-scatter", result_bytes=kept)
    return site._replace(collective=scattered)


CONTROL_FLOW = ("while", "conditional", "call")
"""Opcodes of instructions that run other computations by their own schedules."""


def _calls(
    module: Module, computation: str, instruction: Instruction
) -> Iterator[tuple[str, int | None]]:
    """Yield the computations that an instruction calls, and how many times (None if unknown).

    The start and the end of an asynchronous operation may both name its computation. Only the
    start counts.
    """
    if instruction.opcode.endswith(("-update", "-done")):
        return
    is_loop = instruction.opcode == "while"
    trips = trip_count(module, computation, instruction) if is_loop else 1
    for role, name in instruction.called():
        yield name, trips if trips is None else trips + (role == "condition")


def _continues_another(computation: list[Instruction]) -> bool:
    """Return whether the collective in a computation was started in another one.

    XLA's TPU compiler starts a collective in one fusion, continues it in the fusions of the matmuls
    that run meanwhile, and ends it in another. Each of these contains it, with the same `chain_id`.
    """
    has_chain = any(chain_of(one) for one in computation)
    return has_chain and all(one.target != "AsyncCollectiveStart" for one in computation)


def chain_of(instruction: Instruction) -> str:
    """Return the `chain_id` of a collective, empty if it has none."""
    found = re.search(r'chain_id="(\d+)"', instruction.attributes)
    return found[1] if found else ""


def _collective(instruction: Instruction, devices: int) -> Iterator[Collective]:
    """Yield the instruction as a collective, if it is one that involves several devices."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in UNCOUNTED_KINDS and "is_host_transfer=true" not in instruction.attributes:
        raise ValueError(f"{instruction}: the bytes of a {kind} cannot be counted")
    if kind not in KINDS:
        return
    if kind == "collective-permute":
        pairs = parse_braces(instruction.attribute("source_target_pairs"))
        groups = tuple(pair for pair in pairs if pair[0] != pair[1])
    else:
        groups = parse_groups(instruction.attribute("replica_groups"), devices)
    if any(len(group) > 1 for group in groups):
        yield Collective(kind, groups, bytes_of(instruction.result), 1, instruction.op_name)

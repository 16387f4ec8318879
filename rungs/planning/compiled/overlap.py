"""Which collectives of a compiled program run while the device computes.

A compiled program is scheduled: its text has the instructions in the order in which they run. An
asynchronous collective starts in one place and ends in a later one, and is hidden if there are
matmuls in between. All other collectives are exposed: the device waits for them.

Start and end look different in each compiler:

    GPU  all-gather-start … all-gather-done, or async-start … async-done of a computation
    TPU  a fusion with a custom call AsyncCollectiveStart … one with AsyncCollectiveDone; or as
         on a GPU
"""

from collections.abc import Iterable
from typing import NamedTuple

from jax.sharding import AbstractMesh, Mesh

from rungs.planning.compiled.collectives import Collective, Site, chain_of, sites, summary
from rungs.planning.compiled.hlo import Instruction, Module, Program, trip_count

_MATMUL_TARGETS = ("__cublas", "__cudnn", "__gpu$xla.gpu.triton", "tpu_custom_call")
"""Prefixes of custom calls that are matmuls, attention or hand-written kernels."""


class Overlap(NamedTuple):
    """A collective, and what the device computes while it runs."""

    collective: Collective
    matmuls: int
    """Matmuls between its start and its end, each time it runs; 0 if it is synchronous. Kernels of
    attention and other custom kernels count as one matmul."""

    @property
    def hidden_bytes(self) -> int:
        """Bytes that one device sends while it computes, in one run of the program."""
        return self.collective.total_moved_bytes if self.matmuls else 0


class OverlapTraffic(NamedTuple):
    """All collectives of one kind along the same mesh axes, in one run of the program."""

    kind: str
    axes: tuple[str, ...]
    runs: int
    moved_bytes: int
    """Bytes that one device sends."""
    hidden_bytes: int
    """Bytes of them sent while the device computes."""

    @property
    def exposed_bytes(self) -> int:
        """Bytes for which the device waits."""
        return self.moved_bytes - self.hidden_bytes


def overlaps(program: Program) -> list[Overlap]:
    """Return the collectives of a compiled program, one entry for each call site, in the order of
    `collectives.collectives`. Raises ValueError as `collectives` does, or if the program has no
    schedule or the end of an asynchronous collective is not found."""
    module = Module.parse(program)
    if not module.is_scheduled:
        raise ValueError("the program has no schedule, so it does not say what overlaps")
    return [Overlap(site.collective, _matmuls_during(module, site)) for site in sites(module)]


def overlap_summary(found: Iterable[Overlap], mesh: Mesh | AbstractMesh) -> list[OverlapTraffic]:
    """Return bytes by kind and mesh axes, sorted by these."""
    found = list(found)
    hidden = summary((one.collective for one in found if one.matmuls), mesh)
    hidden_bytes = {(traffic.kind, traffic.axes): traffic.moved_bytes for traffic in hidden}
    return [
        OverlapTraffic(*traffic, hidden_bytes.get((traffic.kind, traffic.axes), 0))
        for traffic in summary((one.collective for one in found), mesh)
    ]


def _matmuls_during(module: Module, site: Site) -> int:
    """Return the matmuls between the start and the end of a collective."""
    between = _before_end(module, module.computations[site.computation][site.position :])
    return sum(_matmuls_in(module, site.computation, instruction) for instruction in between)


def _before_end(module: Module, schedule: list[Instruction]) -> list[Instruction]:
    """Return the instructions between a collective, the first of these, and its end; none if it is
    synchronous."""
    first, names = schedule[0], {schedule[0].name}
    is_start = first.opcode.endswith("-start")
    chain = "" if is_start else _chain(module, first, "AsyncCollectiveStart")
    if not (is_start or chain):
        return []
    for position, instruction in enumerate(schedule):
        if chain and _chain(module, instruction, "AsyncCollectiveDone") == chain:
            return schedule[1:position]
        if is_start and names.intersection(instruction.operands):
            if instruction.opcode.endswith("-done"):
                return schedule[1:position]
            names.add(instruction.name)  # an async-update
    raise ValueError(f"{first}: the end of this collective is not in its computation")


def _chain(module: Module, instruction: Instruction, target: str) -> str:
    """Return the chain of the collective in a fusion with a custom call of this target."""
    if instruction.opcode != "fusion":
        return ""
    inner = [one for _, name in instruction.called() for one in module.computations[name]]
    has_target = any(one.target == target for one in inner)
    return max(map(chain_of, inner)) if has_target else ""


def _matmuls_in(module: Module, computation: str, instruction: Instruction) -> int:
    """Return the matmuls that an instruction runs. A loop of unknown length counts once."""
    is_kernel = instruction.target.startswith(_MATMUL_TARGETS)
    if is_kernel or instruction.opcode in ("dot", "convolution"):
        return 1
    trips = trip_count(module, computation, instruction) if instruction.opcode == "while" else 1
    return (1 if trips is None else trips) * sum(
        _matmuls_in(module, called, inner)
        for _, called in instruction.called()
        for inner in module.computations[called]
    )

"""What JAX's profiler saw of a program, part by part: a kernel counts for the part of the step that
its instruction belongs to. Kernels that run beside others count in full, so the sum may be more
than the step."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from jax.profiler import ProfileData

from rungs.planning.program import CONTROL_FLOW, KINDS, Instruction, Module

SCOPES = {
    "attention": "attention kernel",
    "attention_projections": "attention projections",
    "feed_forward": "feed-forward",
    "experts": "experts",
    "loss": "head and loss",
    "embedding": "embedding",
    "norm": "norms and the rest",
    "gradient_sum": "sum of gradients",
    "optimizer": "optimizer",
}
"""Parts by named scope; the innermost scope decides."""
REST = SCOPES["norm"]
COLLECTIVES, COPIES = "collectives", "copies"
PARTS = (*dict.fromkeys(SCOPES.values()), COLLECTIVES, COPIES)
OTHER = "not in the program"
"""What ran on the device without being an instruction of the program."""
SHARED = "of several parts"
"""Kernels that instructions of different parts share."""
_MATMULS = re.compile("__cublas|__cudnn|__gpu\\$xla.gpu.triton|mosaic_gpu|tpu_custom_call")
"""Targets of custom calls that are matmuls, attention or handwritten kernels."""
_MOVES = (
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "copy", "reshape"),
    *("transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "broadcast"),
    *("copy-start", "slice-start"),
)
"""Opcodes that only move data."""
_TPU_OPERATIONS = ("/device:TPU", "XLA Ops")
"""How a TPU's plane begins, and its line of operations."""
_KERNEL_NAME = re.compile(r'deduplicated_name="([^"]+)"')


class Kernel(NamedTuple):
    """A kernel that ran, with the instruction of the program that it computes."""

    name: str
    instruction: str
    """Empty if there is none."""
    seconds: float


def kernels_in(trace: ProfileData, module: Module) -> list[Kernel]:
    """Return the kernels of a trace, without a program's loops and calls, which consist of
    others."""
    outer = {one.name for one in module.instructions() if one.opcode in CONTROL_FLOW}
    return [kernel for kernel in kernels_of(trace) if kernel.instruction not in outer]


def kernels_of(trace: ProfileData) -> Iterator[Kernel]:
    """Yield what ran on the device: on a GPU in its streams, on a TPU among its operations, which
    are named after instructions, on a CPU in threads of the host."""
    lines = [(plane.name, line) for plane in trace.planes for line in plane.lines]
    streams = [line for _, line in lines if line.name.startswith("Stream")]
    operations = [line for plane, line in lines if (plane[:11], line.name) == _TPU_OPERATIONS]
    threads = [line for plane, line in lines if plane == "/host:CPU"]
    chosen = streams or operations or threads
    for event in itertools.chain.from_iterable(line.events for line in chosen):
        own = event.name.partition(" ")[0].lstrip("%") if operations else ""
        instruction = next((str(it) for name, it in event.stats if name == "hlo_op"), own)
        if instruction or streams:
            yield Kernel(event.name, instruction, event.duration_ns / 1e9)


def host_seconds(trace: ProfileData, name: str) -> float:
    """Return the seconds that the host spent in a `TraceAnnotation`."""
    lines = [line for plane in trace.planes if plane.name == "/host:CPU" for line in plane.lines]
    events = itertools.chain.from_iterable(line.events for line in lines)
    return float(sum(event.duration_ns for event in events if event.name == name) / 1e9)


def part_by_name(module: Module) -> dict[str, str]:
    """Return the part of each instruction of a program, and of each kernel that several of them
    share, by their names."""
    own: dict[str, str] = {}
    shared: dict[str, set[str]] = defaultdict(set)
    for one in module.instructions():
        own[one.name] = part_of(one, module)
        for name in _KERNEL_NAME.findall(one.rest):
            shared[name].add(own[one.name])
    return {name: min(parts) if len(parts) == 1 else SHARED for name, parts in shared.items()} | own


def part_of(one: Instruction, module: Module) -> str:
    """Return the part of a step, one of PARTS, that an instruction belongs to. A matmul keeps what
    is fused with it; pure data movement is a copy."""
    if one.opcode.removesuffix("-start") in KINDS:
        return COLLECTIVES
    inside = [one, *_inside(one, module)]
    matmuls = [inner for inner in inside if _is_matmul(inner)]
    if not matmuls and all(_only_moves(inner) for inner in inside):
        return COPIES
    scopes = (_scope(inner.op_name) for inner in (*matmuls, *inside))
    return next(filter(None, scopes), REST)


def _inside(one: Instruction, module: Module) -> Iterator[Instruction]:
    """Yield the instructions in a fusion, from the result back to the operands."""
    if one.opcode in ("fusion", "fusion-start"):
        for inner in reversed(module.inside(one)):
            yield inner
            yield from _inside(inner, module)


def _is_matmul(one: Instruction) -> bool:
    return one.opcode in ("dot", "convolution") or bool(_MATMULS.match(one.target))


def _only_moves(one: Instruction) -> bool:
    """Return whether an instruction computes nothing but positions, single integers."""
    is_index = re.match(r"[sup]\w*\[\]", one.shape)
    return bool(is_index) or one.opcode in (*_MOVES, "fusion", "fusion-start")


def _scope(op_name: str) -> str:
    """Return the part of the innermost scope in an operation's name, or an empty text."""
    scopes = re.findall(r"(?<![^/(])\w+(?=[/)])", op_name)
    return next((SCOPES[scope] for scope in reversed(scopes) if scope in SCOPES), "")


def seconds_by_part(kernels: Iterable[Kernel], parts: Mapping[str, str]) -> dict[str, float]:
    """Return the seconds of each part, in the order of `PARTS`. `parts` is from `part_by_name`."""
    seconds: dict[str, float] = defaultdict(float)
    for kernel in kernels:
        seconds[parts.get(kernel.instruction, OTHER)] += kernel.seconds
    return {part: seconds[part] for part in (*PARTS, SHARED, OTHER) if part in seconds}

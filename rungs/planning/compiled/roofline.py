"""The least time of a training step on a device, part by part, from its compiled program: a kernel
takes at least FLOPs ÷ peak, and bytes ÷ memory bandwidth (Williams et al. 2009,
https://doi.org/10.1145/1498765.1498785)."""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from rungs.common.errors import UserError
from rungs.optim.precision import dtype_of
from rungs.parallel import target_device
from rungs.planning.communication import abstract_layout
from rungs.planning.compiled import collectives, hlo
from rungs.planning.compiled.step import CompiledStep, is_kernel
from rungs.planning.compiled.work import matmuls_of, moved_bytes
from rungs.planning.flops import hardware_flops_per_token
from rungs.planning.forecast import Forecast
from rungs.planning.hardware import Hardware

TARGET = 0.55
"""Share of the peak to plan for."""
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
ATTENTION, REST, OPTIMIZER = SCOPES["attention"], SCOPES["norm"], SCOPES["optimizer"]
COLLECTIVES, COPIES = "collectives", "copies"
PARTS = (*dict.fromkeys(SCOPES.values()), COLLECTIVES, COPIES)
_MOVES = (
    *("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "copy", "reshape"),
    *("transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "broadcast"),
)
"""Opcodes that only move data."""
_PREFETCHES = ("copy-start", "slice-start")


class Work(NamedTuple):
    """FLOPs and bytes of a device per run of a program, and the least time for them."""

    flops: float
    """FLOPs of matmuls."""
    moved_bytes: float
    """Bytes read from and written to the device's memory."""
    compute_seconds: float
    """Seconds for the FLOPs, at the peak of their dtype."""
    memory_seconds: float
    """Seconds for the bytes, at the memory's bandwidth."""
    kernel_seconds: float
    """Sum over kernels of the longer of the two, excluding transfers that run beside kernels."""

    @property
    def overlapped_seconds(self) -> float:
        """Seconds if all computation and transfers overlap."""
        return max(self.compute_seconds, self.memory_seconds)

    @property
    def serial_seconds(self) -> float:
        """Seconds if kernels run one after another."""
        return max(self.kernel_seconds, self.memory_seconds)

    @property
    def limit(self) -> str:
        """Which takes longer: "FLOPs" or "memory"."""
        return "FLOPs" if self.compute_seconds >= self.memory_seconds else "memory"


class StepFlops(NamedTuple):
    """FLOPs of each device in a step, known without its program."""

    model: float
    """Model FLOPs, the basis of utilization (MFU)."""
    planned: float
    """FLOPs of all matmuls, from the configs."""
    attention: float
    """The part of them in attention, whose kernels do not show theirs."""
    dtype: np.dtype
    """Dtype of the matmuls."""


class Goal(NamedTuple):
    """Seconds of a step at a share of the peak."""

    allowed: float
    """Seconds for the whole step."""
    matmuls: float
    """Seconds of all matmuls at their peak, including recomputation."""
    rest: float
    """Least seconds of the rest: the serial time of all parts less `matmuls`."""

    @property
    def room(self) -> float:
        """Seconds left for the rest; negative if the matmuls alone take too long."""
        return self.allowed - self.matmuls

    @property
    def is_possible(self) -> bool:
        return self.rest <= self.room

    @property
    def matmul_share(self) -> float:
        """Share of peak that the matmuls must reach if the rest takes its least time."""
        return self.matmuls / (self.allowed - self.rest)


class Roofline(NamedTuple):
    """The least time of a step on each device, without links between devices."""

    parts: dict[str, Work]
    """Work by part of the step; parts without FLOPs or bytes are absent."""
    flops: StepFlops
    """FLOPs according to the configs."""
    peak: float
    """FLOP/s in the step's dtype."""

    @property
    def overlapped_seconds(self) -> float:
        """Seconds if computation and transfers overlap within each part."""
        return sum(work.overlapped_seconds for work in self.parts.values())

    @property
    def serial_seconds(self) -> float:
        """Seconds if kernels run one after another."""
        return sum(work.serial_seconds for work in self.parts.values())

    @property
    def total(self) -> Work:
        return _sum(self.parts.values())

    @property
    def flops_ratio(self) -> float:
        """Ratio of the FLOPs of the model's matmuls in the program, without the optimizer's, to
        those from the configs: 1 if they agree."""
        model = (work.flops for part, work in self.parts.items() if part != OPTIMIZER)
        return sum(model) / self.flops.planned

    def utilization(self, seconds: float) -> float:
        """Return the model FLOPs utilization of a step that takes this many seconds."""
        return self.flops.model / self.peak / seconds

    def goal(self, utilization: float = TARGET) -> Goal:
        """Return the times that this utilization requires."""
        matmuls = self.total.compute_seconds
        allowed = self.flops.model / self.peak / utilization
        return Goal(allowed, matmuls, self.serial_seconds - matmuls)


def roofline(program: hlo.Program, hardware: Hardware, flops: StepFlops) -> Roofline:
    """Return the least time of a compiled step. All branches of a conditional count. Raises
    ValueError if a loop has no known trip count, or a matmul cannot be counted. The peaks of
    `hardware` must be known."""
    peak, module = hardware.peak(flops.dtype), hlo.Module.parse(program)
    assert peak is not None
    found: dict[str, list[Work]] = defaultdict(list)
    kernel_bytes = 0
    for instruction, trips in _scheduled(module.computations[module.entry]):
        part = part_of(instruction)
        if part == ATTENTION and is_kernel(instruction.target):
            kernel_bytes += trips * moved_bytes(instruction)
        else:
            found[part].append(_work_of(instruction, trips, hardware))
    if kernel_bytes:
        seconds = flops.attention / peak
        found[ATTENTION].append(_kernel(hardware, kernel_bytes, flops.attention, seconds))
    works = {part: _sum(found[part]) for part in PARTS if part in found}
    return Roofline({part: work for part, work in works.items() if any(work)}, flops, peak)


def step_roofline(forecast: Forecast, step: CompiledStep) -> Roofline | None:
    """Return the roofline of a run's step; None if it does not fit into memory. Raises UserError if
    its program cannot be counted."""
    if isinstance(step.result, str):
        return None
    try:
        return roofline(step.result.program, forecast.hardware, step_flops(forecast))
    except ValueError as error:
        raise UserError(f"--roofline: {error}") from None


def step_flops(forecast: Forecast) -> StepFlops:
    """Return the FLOPs of a step with the kernels of its device's compiler."""
    config, hardware = forecast.config, forecast.hardware
    with target_device.trace_for(hardware.target, is_compiled=True):
        layout = abstract_layout(forecast.sharding)
        vocabulary = layout.padded_vocab_size(config.model.vocab_size)
        flops = hardware_flops_per_token(config, vocabulary)
    tokens = forecast.tokens.per_step / forecast.devices
    return StepFlops(
        tokens * forecast.model_flops_per_token,
        tokens * flops.total,
        tokens * flops.attention.total,
        dtype_of(config.train),
    )


def _scheduled(
    computation: Iterable[hlo.Instruction], trips: int = 1
) -> Iterator[tuple[hlo.Instruction, int]]:
    """Yield the executed instructions, with their number of executions."""
    for instruction in computation:
        if instruction.opcode not in (*collectives.CONTROL_FLOW, "async-start"):
            yield instruction, trips
            continue
        times = hlo.trip_count(instruction)
        if times is None:
            raise ValueError(f"{instruction}: XLA does not know how many times this loop runs")
        yield from _scheduled(instruction.inner, trips * times)


def _work_of(instruction: hlo.Instruction, trips: int, hardware: Hardware) -> Work:
    """Return the work of an instruction that runs this many times."""
    flops, compute = 0, 0.0
    for matmul in matmuls_of(instruction):
        peak = hardware.peak_of_bits(matmul.bits)
        assert peak is not None
        flops += trips * matmul.flops
        compute += trips * matmul.flops / peak
    work = _kernel(hardware, trips * moved_bytes(instruction), flops, compute)
    runs_beside_kernels = instruction.opcode.endswith("-start")
    return work._replace(kernel_seconds=0) if runs_beside_kernels else work


def _kernel(hardware: Hardware, moved: float, flops: float, compute: float) -> Work:
    """Return the work of a kernel. `moved` is in bytes; `compute` is the seconds of its FLOPs."""
    assert hardware.bandwidth is not None
    memory = moved / hardware.bandwidth
    return Work(flops, moved, compute, memory, max(compute, memory))


def _sum(works: Iterable[Work]) -> Work:
    return Work(*map(sum, zip(*works, strict=True)))


def part_of(instruction: hlo.Instruction) -> str:
    """Return the part of a step, one of PARTS, that an instruction outside fusions belongs to. A
    matmul keeps what is fused with it. Pure data movement is a copy, except transfers to or from a
    TPU's fast memory, which belong to the instruction that they serve."""
    if instruction.opcode.removesuffix("-start") in collectives.KINDS:
        return COLLECTIVES
    if instruction.opcode in _PREFETCHES and _changes_memory(instruction):
        return _served(instruction)
    matmul = next(matmuls_of(instruction), None)
    if matmul is None and _only_moves(instruction):
        return COPIES
    names = [matmul.op_name] if matmul else []
    names += [instruction.op_name, *_names_inside(instruction)]
    return next(filter(None, map(_scope, names)), REST)


def _scope(op_name: str) -> str:
    """Return the part of the innermost scope in an operation's name, or an empty text."""
    scopes = re.findall(r"(?<![^/(])\w+(?=[/)])", op_name)
    return next((SCOPES[scope] for scope in reversed(scopes) if scope in SCOPES), "")


def _names_inside(instruction: hlo.Instruction) -> Iterator[str]:
    """Yield the operation names in a fusion, from the result back to the operands."""
    for inner in reversed(instruction.inner if instruction.is_fusion else []):
        yield inner.op_name
        yield from _names_inside(inner)


def _only_moves(instruction: hlo.Instruction) -> bool:
    if instruction.is_fusion:
        return all(_only_moves(inner) or _is_index(inner) for inner in instruction.inner)
    return instruction.opcode in (*_MOVES, *_PREFETCHES)


def _is_index(instruction: hlo.Instruction) -> bool:
    """Return whether the result is a single integer, such as the position of a slice."""
    is_array = not instruction.shape.startswith("(")
    return is_array and instruction.shape[0] in "sup" and not hlo.dimensions_of(instruction.shape)


def _changes_memory(start: hlo.Instruction) -> bool:
    operand = start.inputs[0]
    return bool(hlo.device_bytes_of(operand.result)) != bool(hlo.device_bytes_of(start.result))


def _served(start: hlo.Instruction) -> str:
    """Return the part of the first user of a transfer's result or, for one from fast memory, of the
    instruction that made it."""
    is_arriving = hlo.device_bytes_of(start.result) == 0
    return next(map(part_of, (_users if is_arriving else _makers)(start)), COPIES)


def _users(used: hlo.Instruction) -> Iterator[hlo.Instruction]:
    for one in used.module.computations[used.computation]:
        if used.name in one.operands:
            yield from _users(one) if _passes_on(one) else _if_works(one)


def _makers(made: hlo.Instruction) -> Iterator[hlo.Instruction]:
    one = made.inputs[0]
    yield from _makers(one) if _passes_on(one) else _if_works(one)


def _passes_on(instruction: hlo.Instruction) -> bool:
    opcodes = ("bitcast", "copy-start", "copy-done", "slice-start", "slice-done")
    return instruction.opcode in opcodes or instruction.target == "ConcatBitcast"


def _if_works(instruction: hlo.Instruction) -> Iterator[hlo.Instruction]:
    if instruction.opcode in ("fusion", "custom-call"):
        yield instruction

"""Report of a compiled step next to its estimate, and of its roofline."""

from collections.abc import Iterator

from rungs.common.shown_text import format_duration
from rungs.planning.compiled.roofline import COLLECTIVES, TARGET, Roofline
from rungs.planning.compiled.step import KERNEL_PARTS, XLA, Compiled, CompiledStep
from rungs.planning.forecast import Forecast
from rungs.planning.memory import Memory, format_bytes
from rungs.planning.rows import Column, Part, Row, Table, content, lines

_SHOWN = 4
"""Most parts named as the ones to shrink."""


def step_section(forecast: Forecast, step: CompiledStep) -> Iterator[Part]:
    """Yield the compiler's seconds and bytes of a step."""
    versions = ", ".join(f"{name} {version}" for name, version in step.versions.items())
    yield f"compiled  in {format_duration(step.seconds)} by {versions}; nothing was run"
    found = {"seconds": step.seconds, "versions": step.versions, "fits": fits(forecast, step)}
    if isinstance(step.result, str):
        yield f"  the compiler says: {step.result}"
        yield {"compiled": found | {"out_of_memory": step.result}}
        return
    parts = [
        *_memory(forecast.memory, step.result),
        *_traffic(step.result),
        *_kernels(forecast, step.result),
    ]
    yield from lines(parts)
    yield {"compiled": found | content(parts)}


def fits(forecast: Forecast, step: CompiledStep) -> bool:
    """Return whether the compiled step fits into memory."""
    return not isinstance(step.result, str) and step.result.total <= forecast.usable_bytes


def _memory(memory: Memory, found: Compiled) -> Iterator[Part]:
    arguments = memory.weights + memory.moments + memory.batch
    rest = memory.total - arguments, found.temporary
    note = "weights, optimizer state and token ids"
    compiler = Column("compiler", 14, format_bytes, "bytes_per_device")
    rows = [
        Row("arguments", "arguments", (arguments, found.arguments), note),
        Row("temporary", "temporary", rest, "everything else"),
        Row("peak", "total", (memory.total, found.total), _accuracy(memory, found)),
    ]
    columns = [Column("estimate", 12, format_bytes), compiler]
    table = Table("  bytes per device", 20, columns, rows)
    yield from table.lines()
    yield {key: sizes | {"estimate": memory.total} for key, sizes in table.by_column().items()}


def _accuracy(memory: Memory, found: Compiled) -> str:
    ratio = memory.total / found.total
    is_expected = abs(ratio - 1) <= memory.error
    verdict = "within" if is_expected else "outside"
    return f"the estimate is {ratio:.0%} of it: {verdict} the ± {memory.error:.0%} that it states"


def _traffic(found: Compiled) -> Iterator[Part]:
    if found.uncounted:
        yield f"  collectives are not counted: {found.uncounted}"
    sizes = [Column(heading, 12, format_bytes) for heading in ("sent", "exposed")]
    rows = [
        Row(
            f"{sent.kind} along {' and '.join(sent.axes)}",
            "",
            (sent.runs, sent.moved_bytes, sent.exposed_bytes),
        )
        for sent in found.traffic
    ]
    if rows:
        columns = [Column("runs", 8, "{:,}".format), *sizes]
        yield from Table("  collectives", 32, columns, rows).lines()
        yield "  sent by each device in a step; exposed: while it computes no matmul"
    sent = [one._asdict() | {"exposed_bytes": one.exposed_bytes} for one in found.traffic]
    yield {"collectives": sent, "uncounted": found.uncounted}


def _kernels(forecast: Forecast, found: Compiled) -> Iterator[Part]:
    model, kernels = forecast.config.model, found.kernels
    has = {"attention": model.n_layers > 0, "experts": model.n_experts is not None, "loss": True}
    makers = {part: list(kernels.calls.get(part, {XLA: 0})) for part in KERNEL_PARTS if has[part]}
    for part, names in makers.items():
        yield f"  {part:18}by {', '.join(names)}"
    yield f"  instructions repeated to save memory: {kernels.rematerialized:,}"
    yield f"  kernels with too many registers: {', '.join(kernels.spilled) or 'none'}"
    yield {"kernels": makers, "rematerialized_instructions": kernels.rematerialized}
    yield {"spilled_kernels": kernels.spilled}


def roofline_section(found: Roofline) -> Iterator[Part]:
    """Yield a step's roofline: FLOPs, bytes and seconds."""
    table, goal = _roofline_table(found), found.goal()
    yield from table.lines()
    yield from _notes(found)
    yield from _goal(found)
    figures_by_key = {
        "parts": table.by_row(),
        "seconds": found.overlapped_seconds,
        "seconds_in_turn": found.serial_seconds,
        "model_flops": found.flops.model,
        "flops_of_configs": found.flops.planned,
        "flops_ratio": found.flops_ratio,
        "utilization": found.utilization(found.overlapped_seconds),
        "utilization_in_turn": found.utilization(found.serial_seconds),
        "goal": {
            "utilization": TARGET,
            "seconds": goal.allowed,
            "matmul_seconds": goal.matmuls,
            "seconds_for_the_rest": goal.room,
            "least_seconds_of_the_rest": goal.rest,
            "is_possible": goal.is_possible,
        },
    }
    yield {"roofline": figures_by_key}


def _roofline_table(found: Roofline) -> Table:
    columns = [
        Column("TFLOP", 9, lambda flops: _number(flops / 1e12), "flops"),
        Column("GB", 9, lambda size: _number(size / 1e9), "bytes"),
        Column("compute", 9, _milliseconds, "compute_seconds"),
        Column("memory", 9, _milliseconds, "memory_seconds"),
        Column("bound", 9, _milliseconds, "seconds"),
        Column("share", 7, "{:.0%}".format),
        Column("limit", 8, str, "limit"),
        Column("in turn", 9, _milliseconds, "seconds_in_turn"),
    ]
    total = found.overlapped_seconds
    rows = []
    for name, work in found.parts.items():
        bounds = work.overlapped_seconds, work.overlapped_seconds / total, work.limit
        rows.append(Row(name, name, (*work[:4], *bounds, work.serial_seconds)))
    rows.append(Row("sum", "", (*found.total[:4], total, None, None, found.serial_seconds)))
    return Table("roofline", 25, columns, rows)


def _milliseconds(seconds: float) -> str:
    return _number(1e3 * seconds)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _notes(found: Roofline) -> Iterator[str]:
    yield "  per device and step, times in ms; compute: the FLOPs of matmuls at the device's peak;"
    yield "  memory: the bytes at its memory's bandwidth; bound: the longer of the two; in turn: if"
    yield "  each kernel takes the longer of its own two, one after another"
    bounds = found.overlapped_seconds, found.serial_seconds
    shares = "; in turn, ".join(f"{found.utilization(seconds):.1%}" for seconds in bounds)
    yield f"  model FLOPs utilization: at most {shares}"
    yield f"  FLOPs of the model's matmuls: {found.flops_ratio:.1%} of what the configs give"
    if COLLECTIVES in found.parts:
        yield "  the links between devices are not in it; see the exposed bytes above"


def _goal(found: Roofline) -> Iterator[str]:
    goal = found.goal()
    allowed, matmuls, room, rest = map(
        _milliseconds, (goal.allowed, goal.matmuls, goal.room, goal.rest)
    )
    yield f"  {TARGET:.0%} of the peak is a step of {allowed} ms; matmuls take at least {matmuls}"
    if goal.room <= 0:
        yield "  not possible: the matmuls alone take as long"
        return
    yield f"  all else may take {room} ms, and takes at least {rest} in turn: {_others(found)}"
    if goal.is_possible:
        yield f"  possible if the matmuls reach {goal.matmul_share:.0%} of their peak"
    else:
        yield f"  all else must shrink to {goal.room / goal.rest:.0%}"


def _others(found: Roofline) -> str:
    """Return the parts that take the most time besides their FLOPs, in ms."""
    others = {
        name: work.serial_seconds - work.compute_seconds for name, work in found.parts.items()
    }
    largest = sorted(others, key=others.__getitem__, reverse=True)[:_SHOWN]
    return ", ".join(f"{name} {_milliseconds(others[name])}" for name in largest)

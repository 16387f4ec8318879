"""A compiled step next to its estimate, as lines for people and as JSON for programs."""

from collections.abc import Iterator
from typing import Any

from rungs.common.text_table import format_duration
from rungs.planning.compiled.kernels import PARTS, XLA
from rungs.planning.compiled.overlap import OverlapTraffic
from rungs.planning.compiled.step import Compiled, CompiledStep
from rungs.planning.forecast import Forecast
from rungs.planning.memory import Memory, format_bytes


def as_lines(forecast: Forecast, step: CompiledStep) -> Iterator[str]:
    """Yield the lines of the table."""
    versions = ", ".join(f"{name} {version}" for name, version in step.versions.items())
    yield f"compiled  in {format_duration(step.seconds)} by {versions}; nothing was run"
    if isinstance(step.result, str):
        yield f"  the compiler says: {step.result}"
        return
    yield from _memory(forecast.memory, step.result)
    yield from _traffic(step.result)
    yield from _kernels(forecast, step.result)


def as_content(forecast: Forecast, step: CompiledStep) -> dict[str, Any]:
    """Return the same figures for JSON: seconds and bytes."""
    content = {"seconds": step.seconds, "versions": step.versions, "fits": fits(forecast, step)}
    if isinstance(step.result, str):
        return {**content, "out_of_memory": step.result}
    found = step.result
    return {
        **content,
        "bytes_per_device": {
            "arguments": found.arguments,
            "temporary": found.temporary,
            "total": found.total,
            "estimate": forecast.memory.total,
        },
        "collectives": [_sent(sent) for sent in found.traffic],
        "uncounted": found.uncounted,
        "kernels": _makers(forecast, found),
        "rematerialized_instructions": found.kernels.rematerialized,
        "spilled_kernels": found.kernels.spilled,
    }


def _sent(sent: OverlapTraffic) -> dict[str, Any]:
    return {**sent._asdict(), "exposed_bytes": sent.exposed_bytes}


def fits(forecast: Forecast, step: CompiledStep) -> bool:
    """Return whether the compiled step fits into memory."""
    return not isinstance(step.result, str) and step.result.total <= forecast.usable_bytes


def _memory(memory: Memory, found: Compiled) -> Iterator[str]:
    arguments = memory.weights + memory.moments + memory.batch
    rows = {
        "arguments": (arguments, found.arguments, "weights, optimizer state and token ids"),
        "temporary": (memory.total - arguments, found.temporary, "everything else"),
        "peak": (memory.total, found.total, _accuracy(memory, found)),
    }
    yield f"  {'bytes per device':18}{'estimate':>12}{'compiler':>14}"
    for name, (estimated, compiled, note) in rows.items():
        figures = f"{format_bytes(estimated):>12}{format_bytes(compiled):>14}"
        yield f"  {name:18}{figures}  {note}"


def _accuracy(memory: Memory, found: Compiled) -> str:
    ratio = memory.total / found.total
    is_expected = abs(ratio - 1) <= memory.error
    verdict = "within" if is_expected else "outside"
    return f"the estimate is {ratio:.0%} of it: {verdict} the ± {memory.error:.0%} that it states"


def _traffic(found: Compiled) -> Iterator[str]:
    if found.uncounted:
        yield f"  collectives are not counted: {found.uncounted}"
    if found.traffic:
        yield f"  {'collectives':30}{'runs':>8}{'sent':>12}{'exposed':>12}"
    for sent in found.traffic:
        name = f"{sent.kind} along {' and '.join(sent.axes)}"
        figures = (format_bytes(size) for size in (sent.moved_bytes, sent.exposed_bytes))
        yield f"  {name:30}{sent.runs:8,}" + "".join(f"{figure:>12}" for figure in figures)
    if found.traffic:
        yield "  sent by each device in a step; exposed: while it computes no matmul"


def _kernels(forecast: Forecast, found: Compiled) -> Iterator[str]:
    for part, makers in _makers(forecast, found).items():
        yield f"  {part:18}by {', '.join(makers)}"
    spilled = ", ".join(found.kernels.spilled) or "none"
    yield f"  instructions repeated to save memory: {found.kernels.rematerialized:,}"
    yield f"  kernels with too many registers: {spilled}"


def _makers(forecast: Forecast, found: Compiled) -> dict[str, list[str]]:
    """Return where the kernels of each part of the model come from."""
    model = forecast.config.model
    has = {"attention": model.n_layers > 0, "experts": model.n_experts is not None, "loss": True}
    return {part: list(found.kernels.calls.get(part, {XLA: 0})) for part in PARTS if has[part]}

"""A step's roofline, as lines for people and as JSON for programs."""

from collections.abc import Iterator
from typing import Any

from rungs.common.text_table import align_columns
from rungs.planning.compiled.roofline import TARGET, Roofline, Work
from rungs.planning.compiled.step_parts import COLLECTIVES

_COLUMNS = "roofline", "TFLOP", "GB", "compute", "memory", "bound", "share", "limit", "in turn"
_SHOWN = 4
"""Parts that are named as the ones to shrink."""


def as_lines(found: Roofline) -> Iterator[str]:
    """Yield the lines of the table."""
    rows = [_row(name, work, found) for name, work in found.parts.items()]
    lines = align_columns([_COLUMNS, *rows, _sum_row(found)]).splitlines()
    yield lines[0]
    yield from (f"  {line}" for line in lines[1:])
    yield "  per device and step, times in ms; compute: the FLOPs of matmuls at the device's peak;"
    yield "  memory: the bytes at its memory's bandwidth; bound: the longer of the two; in turn: if"
    yield "  each kernel takes the longer of its own two, one after another"
    yield from _notes(found)
    yield from _goal(found)


def as_content(found: Roofline) -> dict[str, Any]:
    """Return the same figures for JSON: FLOPs, bytes and seconds."""
    goal = found.goal()
    return {
        "parts": {name: _content(work) for name, work in found.parts.items()},
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


def _row(name: str, work: Work, found: Roofline) -> tuple[str, ...]:
    share = work.overlapped_seconds / found.overlapped_seconds
    return (
        name,
        _number(work.flops / 1e12),
        _number(work.moved_bytes / 1e9),
        _milliseconds(work.compute_seconds),
        _milliseconds(work.memory_seconds),
        _milliseconds(work.overlapped_seconds),
        f"{share:.0%}",
        work.limit,
        _milliseconds(work.serial_seconds),
    )


def _sum_row(found: Roofline) -> tuple[str, ...]:
    row = list(_row("sum", found.total, found))
    row[-4:] = _milliseconds(found.overlapped_seconds), "", "", _milliseconds(found.serial_seconds)
    return tuple(row)


def _milliseconds(seconds: float) -> str:
    return _number(1e3 * seconds)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _notes(found: Roofline) -> Iterator[str]:
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
    """Return the parts with the most time besides that of their FLOPs, in ms."""
    others = {
        name: work.serial_seconds - work.compute_seconds for name, work in found.parts.items()
    }
    largest = sorted(others, key=others.__getitem__, reverse=True)[:_SHOWN]
    return ", ".join(f"{name} {_milliseconds(others[name])}" for name in largest)


def _content(work: Work) -> dict[str, Any]:
    return {
        "flops": work.flops,
        "bytes": work.moved_bytes,
        "compute_seconds": work.compute_seconds,
        "memory_seconds": work.memory_seconds,
        "seconds": work.overlapped_seconds,
        "seconds_in_turn": work.serial_seconds,
        "limit": work.limit,
    }

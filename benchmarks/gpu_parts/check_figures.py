"""Figures of the device check in a GPU session."""

from collections.abc import Iterable, Iterator

from benchmarks.gpu_parts.figure import Figure
from rungs.checks.check import Check

_SCALES = {"FLOP/s": (1e-12, "TFLOP/s"), "B/s": (1e-9, "GB/s"), "B": (1e-6, "MB")}
"""Units of the device check, and how they are shown here."""


def converted(checks: Iterable[Check]) -> Iterator[Figure]:
    """Yield each figure of the device check as one of the session."""
    for check in checks:
        problem = f"expected: {check.limit}" if check.passed is False else ""
        if isinstance(check.value, str):
            yield Figure(check.name, [], "", ", ".join((check.value, *check.notes)), problem)
        else:
            scale, unit = _SCALES.get(check.unit, (1.0, check.unit))
            note = ", ".join(check.notes)
            yield Figure(check.name, [check.value * scale], unit, note, problem)

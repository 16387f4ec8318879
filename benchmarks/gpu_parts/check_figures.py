"""Figures of the device check in a GPU session."""

from collections.abc import Iterable, Iterator

from benchmarks.gpu_parts.figure import Figure
from rungs.checks import report

_SCALES = {"FLOP/s": (1e-12, "TFLOP/s"), "B/s": (1e-9, "GB/s"), "B": (1e-6, "MB")}
"""Units of the device check, and how they are shown here."""


def converted(figures: Iterable[report.Figure]) -> Iterator[Figure]:
    """Yield each figure of the device check as one of the session."""
    for figure in figures:
        if isinstance(figure.value, str):
            note = ", ".join(filter(None, (figure.value, figure.note)))
            yield Figure(figure.name, [], "", note, figure.problem)
        else:
            scale, unit = _SCALES.get(figure.unit, (1.0, figure.unit))
            yield Figure(figure.name, [figure.value * scale], unit, figure.note, figure.problem)

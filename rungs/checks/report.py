"""The figures of a device check, as a table for people and as JSON for bug reports."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from rungs.common.shown_text import format_duration
from rungs.planning.memory import format_bytes

FORMAT = 1
"""Version of the JSON format, increased with each incompatible change."""
Source = Literal["read", "measured", "compiled", "computed"]
"""From the system, measured here, from the compiler, or from configs and published figures."""
Unit = Literal["", "FLOP/s", "B/s", "B", "s", "share", "relative error"]
_FORMATS: dict[Unit, Callable[[float], str]] = {
    "FLOP/s": lambda value: f"{value / 1e12:,.3g} TFLOP/s",
    "B/s": lambda value: f"{value / 1e9:,.4g} GB/s",
    "B": format_bytes,
    "s": format_duration,
    "share": lambda value: f"{value:.1%}",
    "relative error": lambda value: f"{value:.1e}",
    "": lambda value: f"{value:,.6g}",
}


@dataclasses.dataclass(frozen=True)
class Figure:
    """One row of the report."""

    part: str
    name: str
    value: float | str
    unit: Unit = ""
    source: Source = "measured"
    note: str = ""
    """Reference for the value."""
    problem: str = ""
    """What is wrong, understandable without the value; empty if nothing is."""

    def as_text(self) -> str:
        """Return the row without its part."""
        marks = ", ".join(filter(None, (self.source, self.note)))
        wrong = f"  WRONG: {self.problem}" if self.problem else ""
        is_text = isinstance(self.value, str)
        value = self.value if is_text else _FORMATS[self.unit](self.value)  # type: ignore[arg-type]
        return f"  {self.name:32}{value:>16}  {marks}{wrong}"


@dataclasses.dataclass(frozen=True)
class Report:
    """All figures of a device check."""

    run: str
    created: str
    """UTC, ISO 8601."""
    seconds: float
    """Duration of the check."""
    figures: Sequence[Figure]

    @property
    def problems(self) -> list[str]:
        """Problems, each with its place."""
        return [f"{one.part}, {one.name}: {one.problem}" for one in self.figures if one.problem]

    def as_json(self) -> str:
        """Return all figures in base units: bytes, seconds, FLOP/s."""
        content = {"format": FORMAT, "problems": self.problems, **dataclasses.asdict(self)}
        return json.dumps(content, indent=2) + "\n"


def as_rows(figures: Iterator[Figure]) -> Iterator[tuple[Figure, str]]:
    """Yield each figure with its lines of the table, headings included."""
    part = ""
    for figure in figures:
        heading = f"{figure.part}\n" if figure.part != part else ""
        part = figure.part
        yield figure, heading + figure.as_text()

"""One measured figure of a GPU session."""

import math
import statistics
from typing import NamedTuple, Self

from benchmarks.report import spread

_SMALL = 1e-4
"""Less is shown as a power of ten."""


class Figure(NamedTuple):
    """A row of the table: the same figure, measured once or several times."""

    name: str
    values: list[float]
    """Of all turns; empty if the figure is a word, which is then in the note."""
    unit: str = ""
    note: str = ""
    """What to compare the figure with."""
    problem: str = ""
    """What is wrong; empty if nothing is."""

    def checked(self) -> Self:
        """Return the figure without values and with a problem if one is not finite."""
        if all(map(math.isfinite, self.values)):
            return self
        shown = ", ".join(f"{value:g}" for value in self.values)
        return self._replace(values=[], problem=self.problem or f"not finite: {shown}")

    def as_text(self) -> str:
        """Return the median, if there are several values with the lowest and the highest, to three
        digits or more, and the unit."""
        if not self.values:
            return ""
        size = abs(statistics.median(self.values))
        if 0 < size < _SMALL:
            return f"{statistics.median(self.values):.1e} {self.unit}".strip()
        digits = max(2 - math.floor(math.log10(size)), 0) if size else 0
        return f"{spread(self.values, digits)} {self.unit}".strip()

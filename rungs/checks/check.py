"""What a check found beside its limit, and the table that every check prints."""

import time
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from rungs.common.shown_text import format_bytes, format_duration

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
_VERDICTS = {True: "ok", False: "FAILED", None: ""}
_NAME, _VALUE, _LINE = 30, 16, 110
"""Characters of a name, a value and a line of the table."""


class Check(NamedTuple):
    """A row of the table."""

    name: str
    value: float | str
    """What was measured."""
    limit: str = ""
    """What is expected; empty if anything is fine."""
    passed: bool | None = None
    """None if nothing is expected, or it could not be checked."""
    notes: tuple[str, ...] = ()
    unit: Unit = ""

    @classmethod
    def skipped(cls, name: str, reason: str) -> "Check":
        """Return a check that was not made."""
        return cls(name, "skipped", notes=(reason,))

    def __str__(self) -> str:
        """Return the row; if it is too long, limit and notes have lines of their own."""
        value = self.value if isinstance(self.value, str) else _FORMATS[self.unit](self.value)
        row = f"{self.name:{_NAME}} {_VERDICTS[self.passed]:7} {value:>{_VALUE}}"
        details = [*([f"expected: {self.limit}"] if self.limit else ()), *self.notes]
        if len(line := "  ".join([row, *details]).rstrip()) <= _LINE:
            return line
        indent = " " * (_NAME + 9)
        return "\n".join([row, *(indent + detail for detail in details)])


def print_checks(checks: Iterable[Check]) -> list[Check]:
    """Print each check as soon as it is done, and finally the names of those that failed. Return
    them all."""
    begin, done = time.perf_counter(), []
    for check in checks:
        print(check, flush=True)
        done.append(check)
    failed = ", ".join(check.name for check in failures(done)) or "none"
    print(f"\n{len(done)} checks in {time.perf_counter() - begin:.0f} s; failed: {failed}")
    return done


def failures(checks: Iterable[Check]) -> list[Check]:
    """Return the checks that failed."""
    return [check for check in checks if check.passed is False]

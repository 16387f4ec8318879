"""Aligned columns, counts and durations for terminal output."""

from collections.abc import Sequence


def align_columns(rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Return rows as lines with aligned columns: the first `left` ones flush left, the others flush
    right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            text.ljust(width) if i < left else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def counted(count: int, thing: str) -> str:
    """Return a count of things, such as `1 step` or `2,000 batches`.

    Args:
        thing: the singular of a noun that takes -s, or -es after -ch and -s.
    """
    ending = "es" if thing.endswith(("ch", "s")) else "s"
    return f"{count:,} {thing}{ending * (count != 1)}"


def format_duration(seconds: float) -> str:
    """Return a duration in its two largest units, such as `2 h 05 min`."""
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02} min" if hours < 48 else f"{hours // 24} d {hours % 24:02} h"

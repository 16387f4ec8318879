"""The structure of a report, from which its text and JSON are made: sections of text lines and
dictionaries of the same figures. Both forms of a table come from its rows."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

Part = str | dict[str, Any]


class Column(NamedTuple):
    """A column of a table."""

    heading: str
    width: int
    """Characters; 0 for a column that is only in the JSON."""
    unit: Callable[[Any], str]
    """Function from a figure to its text."""
    key: str = ""
    """JSON key; empty for a column that is only in the text."""


class Row(NamedTuple):
    """A row of a table, with a figure per column; None leaves the cell empty."""

    label: str
    """Empty for a row that is only in the JSON."""
    key: str
    """JSON key; empty for a row that is only in the text."""
    figures: Sequence[Any]
    note: str = ""


class Table(NamedTuple):
    """Figures by row and column."""

    title: str
    label_width: int
    """Characters before the first column; rows are indented by two of them."""
    columns: Sequence[Column]
    rows: Sequence[Row]

    def lines(self) -> Iterator[str]:
        """Yield the lines of text."""
        headings = "".join(f"{one.heading:>{one.width}}" for one in self.columns if one.width)
        width = max(self.label_width + len(headings) - len(self.title), 0)
        yield f"{self.title}{headings.lstrip():>{width}}".rstrip()
        for label, _, figures, note in filter(lambda row: row.label, self.rows):
            cells = "".join(
                f"{'' if figure is None else column.unit(figure):>{column.width}}"
                for column, figure in zip(self.columns, figures, strict=True)
                if column.width
            )
            yield f"  {label:{self.label_width - 2}}{cells}  {note}".rstrip()

    def by_column(self) -> dict[str, dict[str, Any]]:
        """Return the figures by column key, then row key."""
        rows = self.by_row()
        keys = [column.key for column in self.columns if column.key]
        return {key: {row: figures[key] for row, figures in rows.items()} for key in keys}

    def by_row(self) -> dict[str, dict[str, Any]]:
        """Return the figures by row key, then column key."""
        keys = [column.key for column in self.columns]
        return {
            row.key: {key: figure for key, figure in zip(keys, row.figures, strict=True) if key}
            for row in self.rows
            if row.key
        }


def as_text(sections: Iterable[Iterable[Part]]) -> str:
    """Return a report as text, with an empty line between sections."""
    return "\n\n".join("\n".join(lines(section)) for section in sections)


def as_json(sections: Iterable[Iterable[Part]]) -> str:
    """Return the figures of a report as one JSON object."""
    return json.dumps(content(part for section in sections for part in section), indent=2)


def lines(section: Iterable[Part]) -> list[str]:
    """Return a section's lines of text."""
    return [part for part in section if isinstance(part, str)]


def content(section: Iterable[Part]) -> dict[str, Any]:
    """Return a section's figures for JSON."""
    parts = (part for part in section if not isinstance(part, str))
    return {key: value for part in parts for key, value in part.items()}

"""Text and JSON of a report, made from the same rows."""

import json

from rungs.planning.rows import Column, Part, Row, Table, as_json, as_text

TABLE = Table(
    "bytes (per device)",
    16,
    [
        Column("weights", 12, "{:,} B".format, "weights"),
        Column("total", 8, "{:,} B".format),
        Column("unused", 0, str, "hidden"),
    ],
    [
        Row("layers", "layers", (1000, 1500, 1), "in bfloat16"),
        Row("", "head", (20, 30, 2)),
        Row("free", "", (None, 7, None)),
    ],
)


def test_a_table_shows_rows_with_labels_and_columns_with_a_width() -> None:
    assert list(TABLE.lines()) == [
        "bytes (per device)   weights   total",
        "  layers             1,000 B 1,500 B  in bfloat16",
        "  free                           7 B",
    ]


def test_figures_for_json_are_those_with_keys() -> None:
    assert TABLE.by_column() == {
        "weights": {"layers": 1000, "head": 20},
        "hidden": {"layers": 1, "head": 2},
    }
    assert TABLE.by_row() == {
        "layers": {"weights": 1000, "hidden": 1},
        "head": {"weights": 20, "hidden": 2},
    }


def test_a_report_is_its_lines_or_its_figures() -> None:
    sections: list[list[Part]] = [["first", {"a": 1}, "second"], [{"b": {"c": 2}}, "third"]]
    assert as_text(sections) == "first\nsecond\n\nthird"
    assert json.loads(as_json(sections)) == {"a": 1, "b": {"c": 2}}

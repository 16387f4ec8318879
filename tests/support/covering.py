"""Rows of values in which every pair of values occurs."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def covering_rows(factors: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Return few rows with a value for each factor, so that every two values of two factors are in
    a row together. They are always the same."""
    rows = [
        dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())
    ]
    pairs_of = {id(row): set(itertools.combinations(row.items(), 2)) for row in rows}
    left, chosen = set().union(*pairs_of.values()), []
    while left:
        chosen.append(max(rows, key=lambda row: len(left & pairs_of[id(row)])))
        left -= pairs_of[id(chosen[-1])]
    return chosen


def name_of(row: Row) -> str:
    """Return the values of a row as the id of a test."""
    return "-".join(f"{value}".replace(" ", "_") for value in row.values())

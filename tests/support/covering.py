"""Rows of values in which every pair of values occurs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]


def covering_rows(
    factors: Mapping[str, Sequence[Any]], is_possible: Callable[[Row], bool] = lambda _: True
) -> list[Row]:
    """Return few rows with a value for each factor, so that every two values of two factors that
    are in a possible row are in a row together. They are always the same."""
    every = itertools.product(*factors.values())
    rows = [row for values in every if is_possible(row := dict(zip(factors, values, strict=True)))]
    pairs = [set(itertools.combinations(row.items(), 2)) for row in rows]
    left, chosen = set().union(*pairs), []
    while left:
        best = max(range(len(rows)), key=lambda number: len(left & pairs[number]))
        chosen.append(rows[best])
        left -= pairs[best]
    return chosen


def name_of(row: Row) -> str:
    """Return the values of a row as the id of a test."""
    return "-".join(f"{value}".replace(" ", "_") for value in row.values())

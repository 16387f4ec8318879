"""Fewer steps to draw, with the lowest and highest value of each metric in every stretch."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rungs.run.recorded_run import FloatArray

Rows = NDArray[np.intp]


def extreme_rows(columns: Iterable[FloatArray], steps: int, width: int) -> Rows:
    """Return the rows that have the lowest or highest value of a column in their stretch of `width`
    rows, the first row of each stretch, and the last of all, in order."""
    starts = np.arange(0, steps, width)
    found = [starts, np.array([steps - 1])]
    for column in columns:
        for values in (_stretches(column, width, np.inf), -_stretches(column, width, -np.inf)):
            places = np.argmin(values, axis=1)
            is_finite = np.isfinite(values[np.arange(len(places)), places])
            found.append((starts + places)[is_finite])
    return np.unique(np.concatenate(found))


def stretch_means(column: FloatArray, width: int) -> FloatArray:
    """Return the mean of a column in each stretch of `width` rows, NaN where it has no values."""
    values = _stretches(column, width, np.nan)
    counts = np.isfinite(values).sum(axis=1)
    return np.where(counts, np.nansum(values, axis=1) / np.maximum(counts, 1), np.nan)


def _stretches(column: FloatArray, width: int, missing: float) -> FloatArray:
    """Return a column as rows of `width` values, with `missing` for NaN and after its end."""
    filled = np.where(np.isnan(column), missing, column)
    padding = -len(column) % width
    return np.pad(filled, (0, padding), constant_values=missing).reshape(-1, width)

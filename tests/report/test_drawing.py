"""Ticks of a logarithmic axis, and points left out where they would not be seen."""

import numpy as np
import pytest

from rungs.report import drawing


@pytest.mark.parametrize(("low", "high"), [(2, 11), (3.1, 3.3), (0.3, 40), (1e-9, 10), (1, 1e30)])
def test_logarithmic_ticks_are_few_and_round(low: float, high: float) -> None:
    ticks = drawing.log_ticks(low, high)
    assert 3 <= len(ticks) <= 9
    assert low <= ticks.min()
    assert ticks.max() <= high
    assert all(len(f"{tick:g}") <= 5 for tick in ticks)


def test_a_thinned_line_has_every_extreme_and_long_gaps() -> None:
    x, y = np.arange(50_000.0), np.random.default_rng(0).normal(size=50_000)
    y[[123, 40_321]] = 9.0, -9.0
    y[20_000:21_000] = np.nan
    thin_x, thin_y = drawing.thin_line(x, y)
    assert len(thin_y) <= 2 * drawing.STRETCHES
    np.testing.assert_array_equal(thin_y, y[thin_x.astype(int)])
    assert {123.0, 40_321.0} <= set(thin_x.tolist())
    assert np.isnan(thin_y[(thin_x > 20_100) & (thin_x < 20_900)]).all()
    length = 50_000 // drawing.STRETCHES + 1
    for start in range(0, 20_000 - length, length):
        inside = (start <= thin_x) & (thin_x < start + length)
        part = y[start : start + length]
        assert (thin_y[inside].min(), thin_y[inside].max()) == (part.min(), part.max())


def test_a_short_line_is_not_thinned() -> None:
    x, y = np.arange(3000.0), np.random.default_rng(0).normal(size=3000)
    assert drawing.thin_line(x, y) == (x, y)


def test_thinned_marks_cover_the_same_area() -> None:
    rng = np.random.default_rng(0)
    x, y = np.arange(50_000.0), np.exp(rng.normal(size=50_000))
    y[rng.integers(50_000, size=20)] = np.nan
    thin_x, thin_y = drawing.thin_marks(x, y)
    columns, rows = drawing.GRID
    assert len(thin_y) <= columns * rows
    np.testing.assert_array_equal(thin_y, y[thin_x.astype(int)])
    assert np.nanmax(y) in thin_y
    width, height = 50_000 / columns, np.log(np.nanmax(y) / np.nanmin(y)) / rows
    for at in rng.choice(np.flatnonzero(np.isfinite(y)), 300):
        near = (abs(thin_x - x[at]) <= width) & (abs(np.log(thin_y / y[at])) <= height)
        assert near.any()
    assert len(drawing.thin_marks(x, np.full(50_000, 0.02))[0]) == columns

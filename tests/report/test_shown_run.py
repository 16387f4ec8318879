"""Which of many steps are shown: every spike is kept, and means are means."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rungs.report.page_data import extreme_rows, stretch_means


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=200),
    width=st.integers(1, 50),
)
def test_each_stretch_keeps_its_extremes(values: list[float], width: int) -> None:
    column = np.array(values)
    rows = extreme_rows([column], len(column), width)
    assert list(rows) == sorted(set(rows.tolist()))
    assert {0, len(column) - 1} <= set(rows.tolist())
    for start in range(0, len(column), width):
        stretch = column[start : start + width]
        kept = column[[row for row in rows if start <= row < start + width]]
        if np.isfinite(stretch).any():
            assert np.nanmin(kept) == np.nanmin(stretch)
            assert np.nanmax(kept) == np.nanmax(stretch)


def test_a_single_spike_of_two_metrics_stays() -> None:
    loss, norm = np.ones(100_000), np.ones(100_000)
    loss[54_321], norm[777] = 40.0, -3.0
    rows = extreme_rows([loss, norm], 100_000, 1_000)
    assert {54_321, 777} <= set(rows.tolist())
    assert len(rows) <= 5 * 100 + 1


def test_means_leave_out_missing_values() -> None:
    column = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 9.0])
    np.testing.assert_array_equal(stretch_means(column, 2), [2.0, 5.0, np.nan, 9.0])

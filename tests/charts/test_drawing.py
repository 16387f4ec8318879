"""Ticks of a logarithmic axis."""

import pytest

from rungs.charts import drawing


@pytest.mark.parametrize(("low", "high"), [(2, 11), (3.1, 3.3), (0.3, 40), (1e-9, 10), (1, 1e30)])
def test_logarithmic_ticks_are_few_and_round(low: float, high: float) -> None:
    ticks = drawing.log_ticks(low, high)
    assert 3 <= len(ticks) <= 9
    assert low <= ticks.min()
    assert ticks.max() <= high
    assert all(len(f"{tick:g}") <= 5 for tick in ticks)

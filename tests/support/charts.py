"""Training without drawing."""

import pytest

from rungs.training.chart_process import ChartProcess


def draw_no_charts(patch: pytest.MonkeyPatch) -> None:
    """Draw no charts: each drawing takes seconds in a process of its own."""
    patch.setattr(ChartProcess, "_start", lambda _: None)

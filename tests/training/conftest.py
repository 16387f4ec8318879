"""Fixtures of the training tests."""

import pytest

from rungs.training.chart_process import ChartProcess


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no charts: each drawing takes seconds in a process of its own."""
    monkeypatch.setattr(ChartProcess, "_start", lambda _: None)

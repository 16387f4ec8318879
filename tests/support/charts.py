"""Training without drawing."""

import pytest

from rungs.training.background import ChartProcess


def draw_no_charts(patch: pytest.MonkeyPatch) -> None:
    """Draw no charts: starting the process that does takes a second."""
    patch.setattr(ChartProcess, "_draw", lambda _: None)

"""Charts are redrawn on request, but not too often, and always at the end."""

from pathlib import Path

import pytest

from rungs.training import chart_process
from rungs.training.chart_process import MIN_SECONDS_BETWEEN, ChartProcess


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which each drawing appends a line."""
    file = tmp_path / "drawn"
    script = tmp_path / "charts.py"
    script.write_text(f"open({str(file)!r}, 'a').write('drawn\\n')")
    monkeypatch.setattr(chart_process, "DRAW", [str(script)])
    return file


def times(drawn: Path) -> int:
    return len(drawn.read_text().splitlines())


def test_early_requests_are_drawn_once_at_the_end(drawn: Path, tmp_path: Path) -> None:
    drawer = ChartProcess(tmp_path)
    for _ in range(5):
        drawer.request()
        if drawer._process is not None:
            drawer._process.wait()
    assert times(drawn) == 1
    drawer.finish()
    assert times(drawn) == 2
    drawer.finish()
    assert times(drawn) == 2


def test_later_requests_are_drawn_at_once(
    drawn: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 0.0, 0.0])  # created, requested, started
    monkeypatch.setattr(chart_process.time, "monotonic", lambda: next(clock))
    drawer = ChartProcess(tmp_path)
    drawer.request()
    for readings in (
        [MIN_SECONDS_BETWEEN - 1.0],
        [MIN_SECONDS_BETWEEN] * 2,
        [2.0 * MIN_SECONDS_BETWEEN] * 2,
    ):
        clock = iter(readings)
        drawer.request()
        assert drawer._process is not None
        drawer._process.wait()
    assert times(drawn) == 3


def test_a_failed_drawing_is_logged(
    drawn: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Path(chart_process.DRAW[0]).write_text("raise ValueError('no ink')")
    drawer = ChartProcess(tmp_path)
    drawer.request()
    drawer.finish()
    assert "the charts could not be drawn: ValueError: no ink" in caplog.text
    assert not drawn.exists()

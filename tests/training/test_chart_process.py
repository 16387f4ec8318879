"""Charts are redrawn on request, but not too often, and always at the end."""

import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest

from rungs.charts import run_charts
from rungs.common.signals import StopSignal
from rungs.training import chart_process
from rungs.training.chart_process import MIN_SECONDS_BETWEEN, ChartProcess


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(chart_process, "time", clock)
    return clock


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file to which a stand-in appends a line for each start, and for each drawing."""
    file = tmp_path / "drawn"
    (tmp_path / "stand_in_for_charts.py").write_text(
        textwrap.dedent(f"""\
            import sys
            drawn = open({str(file)!r}, "a", buffering=1)
            drawn.write("started\\n")
            while (line := sys.stdin.readline()).strip():
                drawn.write("drawn\\n")
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(chart_process, "MODULE", "stand_in_for_charts")
    return file


def test_early_requests_are_drawn_once_at_the_end(
    drawn: Path, tmp_path: Path, clock: SimpleNamespace
) -> None:
    drawer = ChartProcess(tmp_path)
    for clock.now in (0.0, 1.0, MIN_SECONDS_BETWEEN - 1.0):
        drawer.request()
    drawer.finish(StopSignal())
    assert drawn.read_text().split() == ["started", "drawn", "drawn"]
    drawer.finish(StopSignal())
    assert drawn.read_text().split() == ["started", "drawn", "drawn"]


def test_later_requests_are_drawn_at_once_by_the_same_process(
    drawn: Path, tmp_path: Path, clock: SimpleNamespace
) -> None:
    drawer = ChartProcess(tmp_path)
    for requests in range(3):
        clock.now = float(requests * MIN_SECONDS_BETWEEN)
        drawer.request()
    drawer.finish(StopSignal())
    assert drawn.read_text().split() == ["started", *["drawn"] * 3]


def test_a_process_that_has_ended_is_started_again(
    drawn: Path, tmp_path: Path, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    drawer = ChartProcess(tmp_path)
    drawer.request()
    assert drawer._process is not None
    drawer._process.kill()
    for clock.now in (1.0 * MIN_SECONDS_BETWEEN, 2.0 * MIN_SECONDS_BETWEEN):
        drawer.request()
    drawer.finish(StopSignal())
    assert "the charts could not be drawn: " in caplog.text
    assert drawn.read_text().split()[-2:] == ["started", "drawn"]


def test_a_failed_drawing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    drawer = ChartProcess(tmp_path / "absent")
    drawer.request()
    drawer.finish(StopSignal())
    assert "charts: not drawn: " in caplog.text


def test_a_drawing_follows_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drawings = iter([ValueError("no ink"), None])
    done = []

    def draw(run_folder: Path) -> None:
        if error := next(drawings):
            raise error
        done.append(run_folder)

    monkeypatch.setattr(run_charts, "draw_run", draw)
    run_charts.main(tmp_path, ["draw\n", "draw\n", "\n", "draw\n"])
    assert done == [tmp_path]
    assert capfd.readouterr().err == "not drawn: no ink\n"

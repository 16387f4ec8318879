"""Charts are redrawn on request, but not too often, and always at the end."""

import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rungs.common.signals import StopSignal
from rungs.report import run_charts
from rungs.run.folder import RunFolder
from rungs.training import background
from rungs.training.background import MIN_SECONDS_BETWEEN_CHARTS, ChartProcess

pytestmark = pytest.mark.usefixtures("drawn_charts")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=0.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(background, "time", clock)
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
            while sys.stdin.readline().strip():
                drawn.write("drawn\\n")
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(background, "CHARTS_MODULE", "stand_in_for_charts")
    return file


def test_early_requests_are_drawn_once_at_the_end(
    drawn: Path, tmp_path: Path, clock: SimpleNamespace
) -> None:
    charts = ChartProcess(RunFolder(tmp_path))
    for clock.now in (0.0, 1.0, MIN_SECONDS_BETWEEN_CHARTS - 1.0):
        charts.request()
    charts.finish(StopSignal())
    assert drawn.read_text().split() == ["started", "drawn", "drawn"]
    charts.finish(StopSignal())
    assert drawn.read_text().split() == ["started", "drawn", "drawn"]


def test_later_requests_are_drawn_at_once_by_the_same_process(
    drawn: Path, tmp_path: Path, clock: SimpleNamespace
) -> None:
    charts = ChartProcess(RunFolder(tmp_path))
    for requests in range(3):
        clock.now = float(requests * MIN_SECONDS_BETWEEN_CHARTS)
        charts.request()
    charts.finish(StopSignal())
    assert drawn.read_text().split() == ["started", *["drawn"] * 3]


def test_a_process_that_has_ended_is_replaced(
    drawn: Path, tmp_path: Path, clock: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    charts = ChartProcess(RunFolder(tmp_path))
    charts.request()
    process = charts._process._process
    assert process is not None
    process.kill()
    process.wait()
    drawn.unlink(missing_ok=True)
    for clock.now in (40.0, 80.0):
        charts.request()
    charts.finish(StopSignal())
    assert "the charts could not be drawn" in caplog.text
    assert drawn.read_text().split() == ["started", "drawn"]


def test_a_failed_drawing_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    charts = ChartProcess(RunFolder(tmp_path / "absent"))
    charts.request()
    charts.finish(StopSignal())
    assert "charts: not drawn: " in caplog.text


class Drawing:
    """Stands in for drawing: fails, or waits for an event before it is done."""

    def __init__(self, failures: int = 0) -> None:
        self.failures, self.times = failures, 0
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def __call__(self, _: Path) -> None:
        self.times += 1
        self.has_begun.set()
        self.may_end.wait()
        if self.times <= self.failures:
            raise ValueError("no ink")

    def requests(self, number: int) -> Iterator[str]:
        """Yield a request and, while it is drawn, more; then the end of the run."""
        yield "draw\n"
        self.has_begun.wait()
        yield from ["draw\n"] * number
        self.may_end.set()
        yield "\n"


def test_a_drawing_follows_one_that_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drawing = Drawing(failures=1)
    monkeypatch.setattr(run_charts, "draw_run", drawing)
    run_charts.main(RunFolder(tmp_path), drawing.requests(1))
    assert drawing.times == 2
    assert capfd.readouterr().err == "not drawn: ValueError: no ink\n"


def test_requests_during_a_drawing_are_drawn_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawing = Drawing()
    monkeypatch.setattr(run_charts, "draw_run", drawing)
    run_charts.main(RunFolder(tmp_path), drawing.requests(3))
    assert drawing.times == 2


def test_it_ends_with_training_that_was_killed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drawing = Drawing()
    monkeypatch.setattr(run_charts, "draw_run", drawing)
    run_charts.main(RunFolder(tmp_path), [])
    assert drawing.times == 0

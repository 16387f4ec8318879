"""Fixtures of the mirror tests."""

import logging
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from rungs.run.folder import RunFolder
from rungs.training.chart_process import ChartProcess
from tests.support.mirrors import Failing, saved_run


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A folder that is not there yet."""
    return tmp_path / "elsewhere" / "mirror"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder with two checkpoints."""
    return saved_run(tmp_path / "run")


@pytest.fixture
def failing(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the mirror through a file system that can be told to fail."""
    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr("rungs.mirror.mirroring._FIRST_DELAY", 0.01)
    yield f"failing://{mirror}"
    Failing.left = 10**9


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no charts: each drawing takes seconds in a process of its own."""
    monkeypatch.setattr(ChartProcess, "_start", lambda _: None)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """What Rungs logs."""
    logger = logging.getLogger("rungs")
    propagates, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, "rungs"):
        yield caplog
    logger.propagate = propagates

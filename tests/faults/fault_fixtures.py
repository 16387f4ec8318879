"""Fixtures of the tests of faults: a dataset, a run that nothing interrupted, no charts."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from rungs.run.folder import RunFolder
from tests.faults.fault_runs import NoDrawer, go, short_run
from tests.support.tiny_run import make_dataset


@pytest.fixture(scope="session")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Not to be changed."""
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    return folder


@pytest.fixture(scope="session")
def straight(tmp_path_factory: pytest.TempPathFactory, datasets_dir: Path) -> RunFolder:
    """A short run that nothing interrupted; not to be changed."""
    run = short_run(tmp_path_factory.mktemp("runs") / "straight")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rungs.training.start.ChartDrawer", NoDrawer)
        assert go(run, datasets_dir) == 0
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A short run that has not begun."""
    return short_run(tmp_path / "run")


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rungs.training.start.ChartDrawer", NoDrawer)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("rungs")
    before, logger.propagate = logger.propagate, True
    with caplog.at_level(logging.INFO, "rungs"):
        yield caplog
    logger.propagate = before

"""Fixtures of the fault-injection tests: a dataset and runs."""

from pathlib import Path

import pytest

from rungs.run.folder import RunFolder
from tests.faults.short_runs import short_run, train_here
from tests.support.tiny_run import make_dataset


@pytest.fixture(scope="session")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the dataset `tiny`; tests must not change it."""
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    return folder


@pytest.fixture(scope="session")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, datasets_dir: Path) -> RunFolder:
    """A short run trained without a fault; tests must not change it."""
    run = short_run(tmp_path_factory.mktemp("runs") / "uninterrupted")
    assert train_here(run, datasets_dir) == 0
    return run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A short run that has not started."""
    return short_run(tmp_path / "run")

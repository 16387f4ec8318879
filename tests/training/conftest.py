"""A finished run that the tests of starts share."""

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from rungs.run.folder import RunFolder
from tests.support.starting import go
from tests.support.tiny_run import make_dataset, make_run


@pytest.fixture(scope="session")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Datasets that tests must not change: tiny; other; and unsplit, without validation split."""
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    make_dataset(folder, "other", seed=1)
    make_dataset(folder, "unsplit", seed=2)
    (folder / "unsplit" / "validation.safetensors").unlink()
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, datasets_dir: Path) -> RunFolder:
    """An uninterrupted run of 24 steps; tests must not change it."""
    run = make_run(tmp_path_factory.mktemp("runs") / "straight")
    assert go(run, datasets_dir) == 0
    return run


@pytest.fixture
def copy(finished: RunFolder, tmp_path: Path) -> RunFolder:
    """A copy of that run."""
    shutil.copytree(finished.path, tmp_path / "copy", symlinks=True)
    return RunFolder(tmp_path / "copy")


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    logger = logging.getLogger("rungs")
    logger.propagate = True
    with caplog.at_level(logging.INFO, "rungs"):
        yield caplog

"""Fixtures of the mirror tests."""

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from rungs.run.folder import RunFolder
from tests.support.mirrors import Failing, saved_run


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    """A folder that is not there yet, whose name is also a pattern."""
    return tmp_path / "elsewhere" / "mirror[1]"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A run folder with two checkpoints."""
    return saved_run(tmp_path / "run")


@pytest.fixture
def failing(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of the mirror through a file system that can be told to fail."""
    fsspec.register_implementation("failing", Failing, clobber=True)
    monkeypatch.setattr("rungs.common.backoff.FIRST_DELAY", 0.01)
    yield f"failing://{mirror}"
    Failing.left = 10**9

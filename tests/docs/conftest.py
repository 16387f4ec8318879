"""A checkout in which documented commands run."""

import shutil
from pathlib import Path

import pytest

from tests.support.checkout import make_checkout, run_shell


@pytest.fixture(scope="session")
def stdlib(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The dataset that most pages train on, which takes longer to build than to train on."""
    place = tmp_path_factory.mktemp("stdlib")
    make_checkout(place)
    assert not run_shell("uv run train.py runs/layers --dry-run", place)
    return place / "datasets" / "python-stdlib"


@pytest.fixture
def checkout(stdlib: Path, tmp_path: Path) -> Path:
    make_checkout(tmp_path)
    shutil.copytree(stdlib, tmp_path / "datasets" / "python-stdlib")
    return tmp_path

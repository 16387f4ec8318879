"""What the tests of the smoke tests share."""

import json
from pathlib import Path

import pytest

from tests.support.tiny_run import MODEL, make_dataset, make_run


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A run without layers, which compiles in seconds, and its dataset."""
    make_dataset(tmp_path / "datasets")
    folder = make_run(tmp_path / "run").path
    (folder / "model.json").write_text(json.dumps(MODEL | {"n_layers": 0}))
    return [str(folder), "--datasets-dir", str(tmp_path / "datasets")]

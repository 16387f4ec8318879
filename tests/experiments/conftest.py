"""Experiments without charts."""

from pathlib import Path
from typing import Any

import pytest

from rungs.report import drawing


@pytest.fixture(autouse=True)
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write empty pictures: drawing takes half a second after each run."""

    def write_all(charts: dict[str, Any], _: object, folder: Path) -> list[Path]:
        for name in charts:
            (folder / name).write_bytes(b"")
        return [folder / name for name in charts]

    monkeypatch.setattr(drawing, "write_all", write_all)

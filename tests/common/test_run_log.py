"""Messages of a run: those of libraries, and `train.log`, which is no link."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from rungs.common import run_log


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Leave the loggers as they were."""
    found = [logging.getLogger(name) for name in ("rungs", "absl")]
    kept = [(one, one.level, one.handlers, one.propagate) for one in found]
    yield
    for one, level, handlers, propagate in kept:
        one.level, one.handlers, one.propagate = level, handlers, propagate


def test_warnings_of_orbax_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_log.log_to_terminal()
    run_log.log_to_file(tmp_path / "train.log")
    orbax = logging.getLogger("absl")
    orbax.info("all is well")
    orbax.warning("Skipping merge of %s", "OCDBT checkpoints")
    orbax.error("which is also raised")
    written = (tmp_path / "train.log").read_text()
    assert " WARNING test_run_log: Skipping merge of OCDBT checkpoints\n" in written
    assert "Skipping merge" in capsys.readouterr().err
    assert written.count("\n") == 1

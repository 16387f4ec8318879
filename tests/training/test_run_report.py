"""What a run says of its devices as it starts."""

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rungs.training import run_report
from tests.support.configs import train_config


def warnings_on(platform: str, caplog: pytest.LogCaptureFixture) -> list[str]:
    mesh: Any = SimpleNamespace(size=6, devices=np.array([SimpleNamespace(platform=platform)]))
    caplog.clear()
    run_report.warn_of_devices(train_config(microbatch_size=6), mesh)
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_idle_accelerators_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.device_count", lambda: 8)
    monkeypatch.setattr(logging.getLogger("rungs"), "propagate", True)
    (line,) = warnings_on("gpu", caplog)
    assert line.startswith("2 of 8 devices are idle: microbatch_size 6 is not divisible by 8;")
    assert warnings_on("cpu", caplog) == []

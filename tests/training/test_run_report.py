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
    run_report.warn_of_idle_devices(train_config(microbatch_size=6), mesh)
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_idle_accelerators_are_warned_of(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jax.device_count", lambda: 8)
    monkeypatch.setattr(logging.getLogger("rungs"), "propagate", True)
    (line,) = warnings_on("gpu", caplog)
    assert line.startswith("2 of 8 devices are idle: microbatch_size 6 is not divisible by 8;")
    assert warnings_on("cpu", caplog) == []


def test_the_number_of_devices_that_share_more_cores_is_logged(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("rungs"), "propagate", True)
    mesh: Any = SimpleNamespace(size=8, devices=np.array([SimpleNamespace(platform="cpu")]))
    caplog.set_level(logging.INFO)
    for cores, is_logged in ((64, True), (8, False)):
        monkeypatch.setattr(run_report, "core_count", lambda cores=cores: cores)
        caplog.clear()
        run_report.log_shared_cores(train_config(microbatch_size=8), mesh)
        assert ("virtual CPU devices: 8 on 64 cores" in caplog.text) == is_logged

"""What a run says of its devices as it starts; its progress: a bar on a terminal, plain lines
elsewhere and in `train.log`."""

import contextlib
import fcntl
import logging
import os
import struct
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rungs.common import run_log
from rungs.run.metrics import StepMetrics
from rungs.training import run_report
from rungs.training.dataset_learner import DatasetLearner
from rungs.training.run_length import RunLength
from rungs.training.run_report import Progress
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


SECONDS = 4.0
"""Of a step; the first, which is compiled, takes 60."""


@pytest.fixture
def log_file(tmp_path: Path) -> Iterator[Path]:
    handlers, level, propagate = run_log.log.handlers, run_log.log.level, run_log.log.propagate
    run_log.log_to_terminal()
    run_log.log_to_file(tmp_path / "train.log")
    yield tmp_path / "train.log"
    run_log.log.handlers, run_log.log.propagate = handlers, propagate
    run_log.log.setLevel(level)


def take(
    first: int, last: int, steps: int, peak: float | None = None, validating_seconds: float = 0
) -> None:
    """Show steps of 100 tokens whose loss is their number; every tenth is validated."""
    now = 0.0
    with Progress(
        first, RunLength(steps), DatasetLearner.headline, peak, clock=lambda: now
    ) as progress:
        for step in range(first, last):
            seconds = 60.0 if step == first else SECONDS
            loss = float(step) if step != 7 else None
            validation = step / 2 if step % 10 == 0 else None
            now += seconds + (validating_seconds if validation is not None else 0)
            progress.show(
                StepMetrics(
                    step,
                    0,
                    loss,
                    1e-3,
                    step / 10,
                    False,
                    0,
                    seconds,
                    100 / seconds,
                    validation_loss=validation,
                )
            )


def lines_of(log_file: Path) -> list[str]:
    return [line.partition(" INFO ")[2] for line in log_file.read_text().splitlines()]


def test_off_a_terminal_lines_at_a_steady_interval_say_how_the_run_does(
    log_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    take(0, 12, steps=1000, peak=50.0)
    expected = [
        "step 0 of 1,000: loss 0.0000, validation loss 0.0000, learning rate 1.00e-03,"
        " gradient norm 0",
        "step 3 of 1,000: loss 2.0000, learning rate 1.00e-03, gradient norm 0.3, 25 tokens/s,"
        " MFU 50%, 1 h 06 min left",
        "step 6 of 1,000: loss 5.0000, learning rate 1.00e-03, gradient norm 0.6, 25 tokens/s,"
        " MFU 50%, 1 h 06 min left",
        "step 9 of 1,000: loss 8.5000, learning rate 1.00e-03, gradient norm 0.9, 25 tokens/s,"
        " MFU 50%, 1 h 06 min left",
    ]
    assert lines_of(log_file) == expected
    assert capsys.readouterr().err.splitlines() == expected


def test_the_time_left_has_validations_in_it_and_does_not_jump(log_file: Path) -> None:
    steps, validating = 200, 100.0
    take(0, steps, steps, validating_seconds=validating)
    shown = {
        int(line.split()[1]): line.rpartition(", ")[2].removesuffix(" left")
        for line in lines_of(log_file)
        if line.endswith(" left")
    }
    for step in range(30, 180, 3):
        true = (steps - 1 - step) * (SECONDS + validating / 10)
        assert _seconds_of(shown[step]) == pytest.approx(true, rel=0.25)


def _seconds_of(duration: str) -> float:
    number, unit, rest, _ = [*duration.split(), "0", ""][:4]
    return float(number) * {"min": 60, "h": 3600, "s": 1}[unit] + float(rest)


def test_a_validation_loss_is_in_the_next_line(log_file: Path) -> None:
    take(8, 14, steps=14)
    *_, last = lines_of(log_file)
    assert last.startswith("step 11 of 14: loss 10.0000, validation loss 5.0000 (step 10), ")


def text_of(terminal: int) -> Iterator[str]:
    """Yield what was written to a terminal whose other end is closed."""
    with contextlib.suppress(OSError):  # there is no more
        while True:
            yield os.read(terminal, 10_000).decode()


@pytest.mark.parametrize(("width", "has_bar"), [(120, True), (0, False)])
def test_a_terminal_has_a_bar_unless_it_has_no_width(
    width: int, has_bar: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal, end = os.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    with os.fdopen(end, "w") as stderr, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        run_log.log_to_terminal()
        run_log.log_to_file(tmp_path / "train.log")
        with Progress(0, RunLength(9), DatasetLearner.headline) as progress:
            for step in range(9):
                progress.show(StepMetrics(step, 0, 1.5, 1e-3, 1.0, False, 0, 20.0, 5.0))
    shown = "".join(text_of(terminal))
    os.close(terminal)
    assert ("%|" in shown) == has_bar
    assert ("step 8 of 9: loss 1.5000" in shown) != has_bar
    assert "step 8 of 9: loss 1.5000" in (tmp_path / "train.log").read_text()


def test_progress_over_bytes_is_in_plain_lines_off_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "SECONDS_BETWEEN_LINES", 0)
    monkeypatch.setattr(run_log, "SECONDS_UNTIL_PROGRESS", 0)
    with run_log.byte_progress("tokenizing", 4000) as bar:
        bar.update(1000)
        bar.update(3000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("tokenizing:   0% 0.00/4.00k")
    assert lines[1].startswith("tokenizing:  25% 1.00k/4.00k")
    assert lines[-1].startswith("tokenizing: 100% 4.00k/4.00k")

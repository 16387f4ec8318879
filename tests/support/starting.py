"""Start runs in this process: trained, refused or crashed."""

from pathlib import Path
from typing import Any

import pytest

from rungs.common.errors import UserError
from rungs.config import run_config
from rungs.run import metrics as metrics_module
from rungs.run.folder import RunFolder, StartOptions
from rungs.training.next_token import next_token
from rungs.training.start import launch


class StoppedEarly(Exception):
    """Simulates a crash."""


def go(run: RunFolder, datasets_dir: Path, **start: Any) -> int:
    return launch(
        run, run_config.load_run(run.path), StartOptions(**start), next_token(datasets_dir)
    )


def files(folder: Path) -> dict[str, bytes]:
    paths = [p for p in folder.rglob("*") if p.is_file() and p.suffix not in {".lock", ".log"}]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def refusal(run: RunFolder, datasets_dir: Path, **start: Any) -> str:
    """Return the message of a refused start; the run folder must not change."""
    before = files(run.path)
    with pytest.raises(UserError) as raised:
        go(run, datasets_dir, **start)
    assert files(run.path) == before
    return str(raised.value)


def crash_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise StoppedEarly once the step is recorded."""
    append = metrics_module.MetricsLog.append

    def append_or_fail(
        self: metrics_module.MetricsLog, step_metrics: metrics_module.StepMetrics
    ) -> None:
        append(self, step_metrics)
        if step_metrics.global_step == step:
            raise StoppedEarly

    monkeypatch.setattr(metrics_module.MetricsLog, "append", append_or_fail)

"""The model check as a command: output, exit codes, and that it writes nothing."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from rungs.common import run_log
from rungs.optim import skipping_optimizer
from smoke_tests import test_model as script


def test_failed_checks_are_named(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_log, "log_to_terminal", lambda: None)
    monkeypatch.setattr(skipping_optimizer, "learning_rate_schedule", lambda *_: lambda _: 0.0)
    result = CliRunner().invoke(script.main, [*arguments, "--steps", "20"])
    assert result.exit_code == 1, result.output
    assert "the first 4 sequences, 16 of their 16 tokens" in result.stdout
    assert result.stdout.count(" ok ") == 7
    assert re.search(r"^overfitting +FAILED +4\.", result.stdout, re.MULTILINE)
    assert result.stdout.endswith("failed: overfitting\n")
    assert {path.name for path in Path(arguments[0]).iterdir()} == {"model.json", "train.json"}

"""Text as users see it."""

import ast
import re

import pytest

from rungs.common import paths, shown_text
from rungs.common.errors import UserError
from tests.support.committed_runs import ROOT


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "no s3://me:hunter2@host/a and https://hunter2@host",
            "no s3://***@host/a and https://***@host",
        ),
        ("header: Bearer hf_planted", "header: Bearer ***"),
        ("mail me@host about https://host/a", "mail me@host about https://host/a"),
        ("\x1b]0;title\x07\n\t\u202egpj\ud800", "\\x1b]0;title\\x07\n\t\\u202egpj\\ud800"),
    ],
)
def test_secrets_and_control_characters_are_not_shown(
    text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    assert shown_text.shown(text) == expected


def test_a_message_has_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    assert str(UserError("a\x1b: hf_planted\n\nb")) == "a\\x1b: ***\nb"
    assert str(UserError.at("a.json", "x: one\ny: two")) == "a.json: x: one\na.json: y: two"
    assert str(UserError.at("a.json", ["x: one"])) == "a.json: x: one"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.5, "0.5 s"), (61, "1 min 01 s"), (7500, "2 h 05 min"), (200_000, "2 d 07 h")],
)
def test_a_duration_has_its_two_largest_units(seconds: float, text: str) -> None:
    assert shown_text.format_duration(seconds) == text


def test_counts_and_columns() -> None:
    counts = [shown_text.counted(*one) for one in ((1, "step"), (2000, "batch"), (0, "bus"))]
    assert counts == ["1 step", "2,000 batches", "0 buses"]
    assert shown_text.align_columns([["a", "b"], ["cc", "10"]]) == "a    b\ncc  10"


FOR_CHECKOUTS = {"common/command.py", "common/shown_text.py", "config/reference.py"}
"""Files that name commands of a checkout to those who have one."""


def test_commands_are_called_as_they_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown_text.command_line("download_dataset") == "uv run download_dataset.py"
    assert shown_text.install_line("math") == "uv sync --extra math"
    monkeypatch.setattr(paths, "checkout", lambda: None)
    assert shown_text.command_line("download_dataset") == "rungs download-dataset"
    assert shown_text.install_line("math") == "uv pip install 'rungs-lm[math]'"


def test_no_message_has_a_command_of_a_checkout() -> None:
    package = ROOT / "rungs"
    for path in package.rglob("*.py"):
        if path.relative_to(package).as_posix() in FOR_CHECKOUTS:
            continue
        tree = ast.parse(path.read_text())
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                is_message = id(node) not in docs
                assert not (is_message and re.search("uv (run|sync)", node.value)), path

"""The pages in `docs/tasks` do what they say: their files are written, and commands and Python run,
in a copy of the checkout whose runs are short."""

import itertools
import re
from pathlib import Path

import pytest

from tests.support.checkout import publish, run_shell, write
from tests.support.committed_runs import ROOT

PAGES = ROOT / "docs" / "tasks"
PART = re.compile(
    r"(?:`(?P<json>[\w/.-]+\.jsonl?)`[^`\n]*:\n\n)?"
    r"^```(?P<kind>\w+)\n(?P<text>(?:# (?P<code>[\w/.-]+\.(?:py|toml))\n)?.*?)^```",
    re.MULTILINE | re.DOTALL,
)
"""A code block. A file's name is in its first line or, for JSON, in the sentence before it."""
PUBLISHED = "Qwen/Qwen2.5-0.5B-Instruct"
ONLY_READ = {"add-a-layer", "add-a-metric", "serve-and-share", "let-an-agent-search"}
"""Pages whose commands are tests and checks that run anyway, after changes to the code, or need a
package or a model that is there; `test_documented_commands.py` runs the last."""


@pytest.mark.long
@pytest.mark.parametrize(
    "page", [p for p in sorted(PAGES.glob("*.md")) if p.stem not in ONLY_READ], ids=lambda p: p.stem
)
def test_commands_run(page: Path, checkout: Path) -> None:
    text = page.read_text(encoding="utf-8").replace(PUBLISHED, "published")
    publish(checkout / "published")
    kinds = []
    for kind, parts in itertools.groupby(PART.finditer(text), kind_of):
        kinds.append(kind)
        if kind == "sh":
            lines = "".join(part["text"] for part in parts).splitlines()
            without_gpu = [line for line in lines if "--extra cuda" not in line]
            assert not run_shell("\n".join(without_gpu), checkout)
        elif kind == "python":
            write(checkout / "cells.py", "".join(part["text"] for part in parts))
            assert not run_shell("uv run python cells.py", checkout)
        elif kind == "file":
            for part in parts:
                write(checkout / (part["json"] or part["code"]), part["text"])
    assert "sh" in kinds


def kind_of(part: re.Match[str]) -> str:
    return "file" if part["json"] or part["code"] else part["kind"]

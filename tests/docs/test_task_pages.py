"""The pages in `docs/tasks` do what they say: their files are written and their commands run, in a
copy of the checkout whose runs are short."""

import re
from pathlib import Path

import pytest

from tests.support.checkout import make_checkout, publish, run_shell, write
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


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    make_checkout(tmp_path)
    return tmp_path


@pytest.mark.long
@pytest.mark.parametrize(
    "page", [p for p in sorted(PAGES.glob("*.md")) if p.stem not in ONLY_READ], ids=lambda p: p.stem
)
def test_commands_run(page: Path, checkout: Path) -> None:
    text = page.read_text(encoding="utf-8").replace(PUBLISHED, "published")
    publish(checkout / "published")
    commands = 0
    for part in PART.finditer(text):
        if name := part["json"] or part["code"]:
            write(checkout / name, part["text"])
        elif part["kind"] == "sh":
            commands += 1
            lines = [line for line in part["text"].splitlines() if "--extra cuda" not in line]
            assert not run_shell("\n".join(lines), checkout)
    assert commands

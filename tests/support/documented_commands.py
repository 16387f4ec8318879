"""The commands that begin with `uv run` in the documentation."""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.committed_runs import ROOT

PAGES = [
    "README.md",
    "runs/README.md",
    "CONTRIBUTING.md",
    "AGENTS.md",
    "benchmarks/README.md",
    "assignment/README.md",
    "assignment/systems/README.md",
    "records/README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("assignment/tasks/*.md")),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/**/*.md")),
    *sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("notebooks/[0-9R]*.[mp]*")),
]
_BLOCK = re.compile(r"^ *```\w*\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_IN_A_LINE = re.compile(r"(?:[A-Z_]+=\S+ )*\S*\buv run .*?(?= && |\s+# |$)", re.MULTILINE)
_IN_A_SENTENCE = re.compile(r"`((?:[A-Z_]+=\S+ )*uv\s+run\s[^`]+)`")


@functools.cache
def commands(page: str) -> list[str]:
    """Return the commands of a page in their order, each once, with single spaces. Lines that end
    with `&` are one with the next."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if page.endswith(".py"):
        text = re.sub(r"^# ?", "", text, flags=re.MULTILINE)
    return list(dict.fromkeys(found for _, found in sorted(_found(text))))


def _found(text: str) -> Iterator[tuple[int, str]]:
    for block in _BLOCK.finditer(text):
        lines = re.sub(r"&\n", "& ", re.sub(r"\\\n", " ", block[1]))
        for line in _IN_A_LINE.finditer(lines):
            yield block.start() + line.start(), " ".join(line[0].split())
    for inline in _IN_A_SENTENCE.finditer(without_blocks(text)):
        yield inline.start(), " ".join(inline[1].split())


def without_blocks(text: str) -> str:
    """Return a page's text with spaces in place of its blocks of code."""
    return _BLOCK.sub(lambda block: " " * len(block[0]), text)


def is_fenced(page: Path, command: str) -> bool:
    """Whether a command stands in a block of a page."""
    blocks = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return any(command in line for block in blocks for line in block.splitlines())

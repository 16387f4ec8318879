"""What pages name exists: pages and headings by links, files, options, and the commands of the
package. Those of a clone are in `test_documented_commands.py`, tables and figures in
`tests/benchmarks`. Links to other sites are not tried."""

import functools
import re
import shlex
from pathlib import Path

import click
import pytest

from docs_site import build
from rungs.cli import COMMANDS
from tests.support.commands import check_arguments, command_of
from tests.support.committed_runs import ROOT
from tests.support.documented_commands import PAGES, without_blocks

README = (ROOT / "README.md").read_text(encoding="utf-8")
NOT_ON_THE_SITE = "*.md", "benchmarks/*.md", "assignment/**/*.md"
TODAY = [page for page in PAGES if page != "docs/log.md"]
"""Pages that name what there is, not what there was on a date."""
PROGRAMS = ("*.py", "rungs/**/*.py", "smoke_tests/*.py", "benchmarks/**/*.py", "assignment/*.py")
PAGE = re.compile(r"(?<![\w/])((?:docs|runs|assignment|notebooks)/[\w/-]+\.md)(?:#([\w-]+))?")
FILE = re.compile(r"`((?:[\w.]+/)*\w+\.py|\.ci/\w+)`")
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
DEFINED = re.compile(r"[\"/](--[a-z][\w-]*)")
WITHOUT_A_CLONE = re.compile(r"(?:^|`)(?:uvx --from \S+ )?rungs ([a-z][^`\n]*)", re.MULTILINE)
OF_OTHERS = {
    *("--extra", "--group", "--with", "--with-editable", "--torch-backend", "--refresh"),
    *("--format", "--query-gpu", "--shm-size", "--worker", "--ntasks-per-node"),
    "--version",  # click's
    "--tb",  # pytest's
    "--xla_gpu_load_autotune_results_from",
}
"""Options of other programs."""


def test_links_lead_to_pages_and_to_headings() -> None:
    others = [path for name in NOT_ON_THE_SITE for path in ROOT.glob(name)]
    for source in {*build.sources(), *others}:
        for link in build.LINK.finditer(build.text_of(source)):
            place, _, anchor = link[3].partition("#")
            if "://" not in link[3]:
                check_link(source, source.parent / place if place else source, anchor)


def test_the_program_names_pages_that_exist() -> None:
    for source in [path for name in PROGRAMS for path in ROOT.glob(name)]:
        for name, anchor in PAGE.findall(source.read_text(encoding="utf-8")):
            check_link(source, ROOT / name, anchor)


def check_link(source: Path, target: Path, anchor: str) -> None:
    assert target.exists(), f"{source}: {target}"
    if anchor and target.suffix == ".md":
        assert anchor in anchors(target.resolve()), f"{source}: {target}#{anchor}"


def anchors(path: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", TODAY)
def test_files_that_a_page_names_exist(page: str) -> None:
    """By their path or the end of it, as code."""
    for name in FILE.findall((ROOT / page).read_text(encoding="utf-8")):
        assert any(f"/{path}".endswith(f"/{name}") for path in files()), name


@functools.cache
def files() -> list[str]:
    found = [path for name in ("*.py", "[a-z]*/**/*.py", ".ci/*") for path in ROOT.glob(name)]
    return [path.relative_to(ROOT).as_posix() for path in found]


@pytest.mark.parametrize("page", TODAY)
def test_options_that_a_page_names_exist(page: str) -> None:
    """In sentences, where no command tells whose they are."""
    text = without_blocks((ROOT / page).read_text(encoding="utf-8"))
    named = {option for code in re.findall(r"`[^`]+`", text) for option in OPTION.findall(code)}
    assert named <= options() | OF_OTHERS


@functools.cache
def options() -> set[str]:
    sources = [path.read_text() for name in PROGRAMS for path in ROOT.glob(name)]
    return {option for source in sources for option in DEFINED.findall(source)}


def test_a_row_of_the_readme_names_options_of_its_command() -> None:
    rows = re.findall(r"^\| `uv run (\S+\.py)[^`]*`(.*)$", README, re.MULTILINE)
    assert len(rows) > 15
    for script, rest in rows:
        assert {*re.findall(r"`(--[\w-]+)", rest)} <= options_of(command_of(script)), script


@pytest.mark.parametrize("page", TODAY)
def test_commands_without_a_clone_take_their_arguments(page: str) -> None:
    for command in WITHOUT_A_CLONE.findall((ROOT / page).read_text(encoding="utf-8")):
        name, *words = shlex.split(command, comments=True)
        assert name in {name for names in COMMANDS.values() for name in names}
        if words:
            check_arguments(f"{name.replace('-', '_')}.py", words)


def options_of(command: click.Command) -> set[str]:
    own = {name for one in command.params for name in (*one.opts, *one.secondary_opts)}
    parts = command.commands.values() if isinstance(command, click.Group) else []
    return own.union(*map(options_of, parts))

"""Write the tables of the pages that come from files of `on_a_gpu.py` and from experiments.

A table goes between two lines in a page. The first names a file of `benchmarks/gpu_results/` and
what to show of it, a part or "machine", or an experiment with a ledger:

    <!-- generated: nvidia-h200-51d27786.json step, flash attention -->
    <!-- end -->
    <!-- generated: experiments/ladder -->
    <!-- end -->
"""

from rungs.common.command import run_command

import re
from pathlib import Path
from typing import Any

import click

from benchmarks.gpu_parts.results import figures_of, mark, read
from rungs.experiments.experiment import Outcomes
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.ledger import Ledger
from rungs.experiments.table import as_markdown, rows

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("README.md"), *ROOT.glob("r*s/README.md")]
RESULTS = ROOT / "benchmarks/gpu_results"
BLOCK = re.compile(r"(<!-- generated: (\S+)(?: ([^\n]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
SHOWN = ("done", "stopped")
"""States of parts whose figures are shown."""


@click.command()
def main() -> None:
    """Bring the generated tables of all pages up to date."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = with_tables(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            click.echo(f"{page.relative_to(ROOT)}: changed")


def with_tables(text: str) -> str:
    """Return a page's text with the tables that its marks name.

    Raises:
        UsageError: a mark names no file or no part that was measured.
    """

    def block(found: re.Match[str]) -> str:
        name, what = found[2], found[3]
        table = shown(name, what) if what else of_experiment(ROOT / name)
        return f"{found[1]}\n{table}\n\n{found[4]}"

    return BLOCK.sub(block, text)


def of_experiment(folder: Path) -> str:
    """Return the table of an experiment and its conclusions, as its ledger has them."""
    experiment, ledger = ExperimentFolder(folder).load(), Ledger(folder / "ledger.jsonl")
    outcomes = Outcomes(ledger.outcomes, ledger.proposals)
    found = as_markdown(experiment, rows(experiment, outcomes))
    return "\n\n".join([found.rstrip(), *experiment.conclusions(outcomes)])


def shown(name: str, what: str) -> str:
    """Return the table of a part of a file, or the sentence about its machine."""
    content = read(RESULTS / name)
    if content["rehearsal"]:
        raise click.UsageError(f"{name}: of a rehearsal, whose figures say nothing")
    if what == "machine":
        return machine(name, content)
    part = content["parts"].get(what)
    if part is None or part["state"] not in SHOWN:
        raise click.UsageError(f"{name}: {what} was not measured")
    return table(part)


def machine(name: str, content: dict[str, Any]) -> str:
    """Return when, on what and with which code a file's figures were measured."""
    measured = content["measured"]
    versions = ", ".join(f"{one} {version}" for one, version in measured["versions"].items())
    return (
        f"{content['begun']}: {measured['device']}; {measured['processor']}; {versions}. Code"
        f" `{measured['code']}`; [all figures](../benchmarks/gpu_results/{name}). Medians, with the"
        " lowest and the highest of several turns."
    )


def table(part: dict[str, Any]) -> str:
    """Return the table of a part."""
    what = part["what"]
    title = what[0].upper() + what[1:]
    stopped = "" if part["state"] == "done" else ", stopped before its end"
    rows = [
        f"| {cell(figure.name)} | {cell(figure.as_text())} | {cell(mark(figure))} |"
        for figure in figures_of(part)
    ]
    return "\n".join([f"| {cell(title)}{stopped} | | |", "|---|---:|---|", *rows])


def cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    run_command(main)

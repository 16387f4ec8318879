"""Write the tables and figures of the pages that come from committed results.

A table goes between two lines in a page. The first names a file of `benchmarks/gpu_results/` and
what to show of it, a part or "machine", an experiment with a ledger, or a race:

    <!-- generated: nvidia-h200-51d27786.json step, flash attention -->
    <!-- end -->
    <!-- generated: experiments/ladder -->
    <!-- end -->
    <!-- generated: benchmarks/racing/measured/h200 -->
    <!-- end -->

A figure in a sentence goes between marks, too, the first with a name of `quoted_figures.py`:

    in <!-- figure: race-minutes -->1.75<!-- end --> minutes
"""

from rungs.common.command import run_command

import json
import re
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.gpu_parts.results import figures_of, mark, read
from benchmarks.quoted_figures import RESULTS, ROOT, quoted
from rungs.experiments.experiment import Outcomes
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.ledger import Ledger
from rungs.experiments.table import as_markdown, rows
from rungs.experiments.verdict import mean_interval

PAGES = [*sorted(ROOT.glob("docs/**/*.md")), *ROOT.glob("README.md"), *ROOT.glob("r*s/README.md")]
BLOCK = re.compile(r"(<!-- generated: (\S+)(?: ([^\n]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: ([\w-]+) -->).*?(<!-- end -->)")
SIDE = re.compile(r"(\S+) at (\S+), (\S+) min")
"""A side of a race: what trains, its learning rate, its minutes."""
SIDES = {
    "pytorch": "PyTorch, GPT-2",
    "rungs-gpt2": "Rungs, GPT-2",
    "rungs-recipe": "Rungs, the recipe",
}
SHOWN = ("done", "stopped")
"""States of parts whose figures are shown."""


@click.command()
def main() -> None:
    """Bring the generated tables and figures of all pages up to date."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        after = with_tables(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            click.echo(f"{page.relative_to(ROOT)}: changed")


def with_tables(text: str) -> str:
    """Return a page's text with the tables and figures that its marks name.

    Raises:
        UsageError: a mark names no file, no part that was measured or no figure.
    """

    def block(found: re.Match[str]) -> str:
        name, what = found[2], found[3]
        folder = ROOT / name
        is_race = (folder / "race.json").is_file()
        of_folder = of_race if is_race else of_experiment
        table = shown(name, what) if what else of_folder(folder)
        return f"{found[1]}\n{table}\n\n{found[4]}"

    return FIGURE.sub(figure, BLOCK.sub(block, text))


def figure(found: re.Match[str]) -> str:
    """Return a figure of a sentence between its marks."""
    if found[2] not in quoted():
        raise click.UsageError(f"{found[2]}: no figure of quoted_figures.py")
    return f"{found[1]}{quoted()[found[2]]}{found[3]}"


def of_race(folder: Path) -> str:
    """Return the table of a race, whose last side is the one to beat."""
    *others, first = json.loads((folder / "race.json").read_text())
    goal = np.mean(first["final"])
    header = f"| side | minutes | steps | bits per byte | minutes to {goal:.4f}, by seed |"
    return "\n".join([header, "|---|---:|---:|---:|---:|", *map(side, [first, *others])])


def side(one: dict[str, Any]) -> str:
    """Return a row of that table."""
    found = SIDE.fullmatch(one["side"])
    assert found, one["side"]
    spread = f" ± {mean_interval(one['final']):.4f}" if len(one["final"]) > 1 else ""
    reached = ["never" if time is None else f"{time:.2f}" for time in one["minutes_to_goal"]]
    cells = [
        f"{SIDES[found[1]]}, learning rate {found[2]}",
        found[3],
        ", ".join(f"{steps:,}" for steps in one["steps"]),
        f"{np.mean(one['final']):.4f}{spread}",
        ", ".join(reached),
    ]
    return f"| {' | '.join(cells)} |"


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

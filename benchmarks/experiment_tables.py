"""Write the tables of experiments into the pages that show them, and copy their charts.

A page has `<!-- table of experiments/NAME -->` where the table goes, up to
`<!-- end of the table -->`. Charts that are in docs/images as NAME-effects.png and such are copied
from the experiment's folder, if it was conducted here.
"""

from rungs.common.command import run_command

import re
import shutil
from pathlib import Path

import click

from rungs.experiments import table
from rungs.experiments.experiment import Outcomes
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.ledger import Ledger

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "runs/README.md", ROOT / "records/README.md", *sorted(ROOT.glob("docs/**/*.md"))
IMAGES = ROOT / "docs/images"
TABLE = re.compile(r"(<!-- table of (\S+) -->\n)(.*?)(<!-- end of the table -->)", re.DOTALL)


@click.command()
def main() -> None:
    """Write all tables and charts of the experiments that have a ledger."""
    for page in PAGES:
        before = page.read_text(encoding="utf-8")
        if (after := with_tables(before)) != before:
            page.write_text(after, encoding="utf-8")
            click.echo(page)
    for chart in ROOT.glob("experiments/*/*.png"):
        target = IMAGES / f"{chart.parent.name}-{chart.name}"
        if target.exists():
            shutil.copyfile(chart, target)


def with_tables(text: str) -> str:
    """Return a page with its tables as the ledgers have them."""
    return TABLE.sub(lambda found: f"{found[1]}\n{_table(found[2])}\n{found[4]}", text)


def _table(name: str) -> str:
    folder = ExperimentFolder(ROOT / name)
    experiment, ledger = folder.load(), Ledger(folder.ledger)
    outcomes = Outcomes(ledger.outcomes, ledger.proposals)
    said = "".join(f"\n{line}\n" for line in experiment.conclusions(outcomes))
    return table.as_markdown(experiment, table.rows(experiment, outcomes)) + said


if __name__ == "__main__":
    run_command(main)

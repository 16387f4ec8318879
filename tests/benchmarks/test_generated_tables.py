"""Tables of the pages that are generated from committed results."""

import dataclasses
from pathlib import Path

import click
import pytest

from benchmarks.generated_tables import BLOCK, PAGES, with_tables
from rungs.experiments.ledger import Ledger
from tests.support.simulated_runs import Simulated, conduct, make_experiment, noisy

MARKS = "<!-- generated: nvidia-h200-51d27786.json {} -->\n{}<!-- end -->"


def test_the_pages_have_the_figures_of_the_committed_files() -> None:
    """If this fails: `uv run benchmarks/generated_tables.py`."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [with_tables(text) for text in texts] == texts
    blocks = sum(len(BLOCK.findall(text)) for text in texts)
    assert blocks == sum(text.count("<!-- generated: ") for text in texts) > 0


def test_a_table_takes_the_place_of_an_old_one() -> None:
    old = MARKS.format("llama", "\n| training | 1 tokens/s |\n\n")
    new = with_tables(old)
    assert "| training | 77,242 (76,998 to 77,575) tokens/s |" in new
    assert "| 1 tokens/s" not in new
    assert with_tables(new) == new
    assert new == with_tables(MARKS.format("llama", ""))


def test_a_table_is_that_of_an_experiments_ledger(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, variants={"slow": {"learning_rate": 0.001}})
    _, conductor = conduct(folder, Simulated(noisy(lambda changes: 3 + len(changes), 0.01)))
    (other,) = [one for one in conductor.outcomes.values() if one.run == "slow-seed2"]
    mark = f"<!-- generated: {folder.path} -->\n{{}}<!-- end -->\n"
    text = with_tables(mark.format("an old table\n"))
    report = (folder.path / "report.md").read_text()
    table = text.removeprefix(mark.format("").splitlines()[0]).removesuffix("<!-- end -->\n")
    assert table.strip().startswith("| run | validation loss |")
    assert table.strip() in report
    assert with_tables(text) == text
    Ledger(folder.ledger).add_outcome(dataclasses.replace(other, value=9.0))
    assert with_tables(text) != text


@pytest.mark.parametrize("part", ["a part", "machines"])
def test_a_part_that_was_not_measured_is_refused(part: str) -> None:
    with pytest.raises(click.UsageError, match=f"{part} was not measured"):
        with_tables(MARKS.format(part, ""))

"""Tables of the pages that are generated from committed results."""

import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import click
import numpy as np
import pytest

from benchmarks.generated_tables import BLOCK, FIGURE, PAGES, with_tables
from benchmarks.quoted_figures import RACES, RESULTS, ROOT, quoted
from rungs.experiments.ledger import Ledger
from tests.support.simulated_runs import Simulated, conduct, make_experiment, noisy

NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
MARKS = "<!-- generated: nvidia-h200-51d27786.json {} -->\n{}<!-- end -->"


def test_the_pages_have_the_figures_of_the_committed_files() -> None:
    """If this fails: `uv run benchmarks/generated_tables.py`."""
    texts = [page.read_text(encoding="utf-8") for page in PAGES]
    assert [with_tables(text) for text in texts] == texts
    blocks = sum(len(BLOCK.findall(text)) for text in texts)
    assert blocks == sum(text.count("<!-- generated: ") for text in texts) > 0
    names = [name for text in texts for _, name, _ in FIGURE.findall(text)]
    assert len(names) == sum(text.count("<!-- figure: ") for text in texts)
    assert set(names) == set(quoted())


def test_no_page_has_a_committed_figure_without_marks() -> None:
    """If this fails: name the figure in `quoted_figures.py`, and mark it in the page. The log is
    about what was measured on its dates."""
    typed = {
        (page.relative_to(ROOT).as_posix(), number)
        for page in PAGES
        if page.name != "log.md"
        for number in NUMBER.findall(FIGURE.sub("", BLOCK.sub("", page.read_text())))
    }
    figures = set(committed())
    assert {"526,391", "0.8581", "2.3194", "4.588"} <= figures
    assert {(page, number) for page, number in typed if number in figures} == set()


def committed() -> Iterator[str]:
    """Yield the figures in committed files that have four digits or more, as pages show them."""
    for path in RESULTS.glob("*.json"):
        for part in json.loads(path.read_text())["parts"].values():
            medians = [np.median(one["values"]) for one in part["figures"] if one["values"]]
            yield from (f"{one:,.0f}" for one in medians if one >= 1000)
    for path in RACES.glob("*/race.json"):
        for side in json.loads(path.read_text()):
            yield from (f"{one:.4f}" for one in [*side["final"], np.mean(side["final"])])
            yield from (f"{one:,}" for one in side["steps"] if one >= 1000)
    for path in RACES.glob("*/pytorch-*.jsonl"):
        yield f"{json.loads(path.read_text().splitlines()[-1])['loss']:.3f}"


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


def test_a_figure_of_a_sentence_is_written_between_its_marks() -> None:
    text = (
        "in <!-- figure: race-minutes -->9<!-- end --> and <!-- figure: step-sketch --><!-- end -->"
    )
    assert with_tables(text) == text.replace("9", "1.75").replace("><!-- end", ">547,126<!-- end")
    with pytest.raises(click.UsageError, match="race-hours"):
        with_tables("<!-- figure: race-hours --><!-- end -->")


def test_a_table_is_that_of_a_race(tmp_path: Path) -> None:
    shutil.copytree(RACES / "h200", tmp_path / "race")
    path = tmp_path / "race" / "race.json"
    path.write_text(path.read_text().replace("0.8581005446846276", "0.9"))
    table = with_tables(f"<!-- generated: {path.parent} -->\n<!-- end -->")
    assert "| minutes to 0.9000, by seed |" in table
    assert "| PyTorch, GPT-2, learning rate 0.0012 | 5 | 3,346 | 0.9000 | 5.00 |" in table
    assert table.index("PyTorch") < table.index("the recipe")

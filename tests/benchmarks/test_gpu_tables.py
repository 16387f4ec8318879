"""Tables of the pages that are generated from committed results."""

import click
import pytest

from benchmarks.gpu_tables import BLOCK, PAGES, with_tables

MARKS = "<!-- generated: nvidia-h200-51d27786.json {} -->\n{}<!-- end -->"


def test_the_pages_have_the_figures_of_the_committed_files() -> None:
    """If this fails: `uv run benchmarks/gpu_tables.py`."""
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


@pytest.mark.parametrize("part", ["a part", "machines"])
def test_a_part_that_was_not_measured_is_refused(part: str) -> None:
    with pytest.raises(click.UsageError, match=f"{part} was not measured"):
        with_tables(MARKS.format(part, ""))

"""Which of many steps are shown, and reading metrics.jsonl as it grows, whatever it has.

Every spike is kept, and means are means."""

import json
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rungs.page.shown_run import StepTable, extreme_rows, stretch_means
from tests.support.recorded_runs import step


def lines(*steps: dict[str, object]) -> str:
    return "".join(json.dumps(one) + "\n" for one in steps)


def test_it_has_numbers_parts_and_texts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        lines(
            step(0, validation_losses={"a": 1.5, "b": 2}, expert_tokens=[[1, 2]], resumed=True),
            step(1, train_loss=None, spike="skipped"),
        )
    )
    table = StepTable(path)
    assert table.refresh()
    assert table.columns["validation_losses.a"].tolist()[0] == 1.5
    assert np.isnan(table.columns["train_loss"][1])
    assert table.columns["resumed"][0] == 1
    assert table.texts == {"spike": {1: "skipped"}}
    assert not {"spike", "expert_tokens", "validation_losses"} & table.columns.keys()


def test_torn_lines_and_wrong_values_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = lines(step(0)) + '{"global_step": 1, "train_lo\n' + "[]\n3\nnull\n\n"
    rows += '{"global_step": "x"}\n{"global_step": -1}\n{"train_loss": 4}\n\xff\x00\n'
    rows += '{"global_step": 2, "train_loss": NaN, "gradient_norm": 1e999, "clipped": "yes"}\n'
    rows += lines(step(3, train_loss={"a": []}))
    path.write_bytes(rows.encode("latin-1"))
    table = StepTable(path)
    table.refresh()
    assert table.columns["global_step"].tolist() == [0, 2, 3]
    assert np.isnan(table.columns["train_loss"][1:]).all()
    assert np.isnan(table.columns["gradient_norm"][1])


def test_it_reads_only_what_was_added_and_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    table = StepTable(path)
    assert not table.refresh()
    path.write_text(lines(step(0)))
    assert table.refresh()
    assert not table.refresh()
    with path.open("a") as file:
        file.write(lines(step(1)) + lines(step(2))[:20])
    assert table.refresh()
    assert len(table) == 2
    with path.open("a") as file:
        file.write(lines(step(2))[20:])
    assert table.refresh()
    assert table.columns["train_loss"].tolist() == [3.0, 2.5, 2 + 1 / 3]


def test_a_replaced_file_is_read_again(tmp_path: Path) -> None:
    """As after a kill, when training goes back to the last checkpoint."""
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(*map(step, range(10))))
    table = StepTable(path)
    table.refresh()
    path.with_suffix(".new").write_text(lines(*(step(n, train_loss=7.0) for n in range(20))))
    path.with_suffix(".new").replace(path)
    assert table.refresh()
    assert set(table.columns["train_loss"]) == {7.0}
    path.unlink()
    assert table.refresh()
    assert len(table) == 0


def test_of_a_step_with_two_lines_the_later_counts(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines(step(0), step(1, train_loss=9.0), step(2), step(1, train_loss=8.0)))
    table = StepTable(path)
    table.refresh()
    assert table.columns["global_step"].tolist() == [0, 1, 2]
    assert table.columns["train_loss"][1] == 8.0


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=200),
    width=st.integers(1, 50),
)
def test_each_stretch_keeps_its_extremes(values: list[float], width: int) -> None:
    column = np.array(values)
    rows = extreme_rows([column], len(column), width)
    assert list(rows) == sorted(set(rows.tolist()))
    assert {0, len(column) - 1} <= set(rows.tolist())
    for start in range(0, len(column), width):
        stretch = column[start : start + width]
        kept = column[[row for row in rows if start <= row < start + width]]
        if np.isfinite(stretch).any():
            assert np.nanmin(kept) == np.nanmin(stretch)
            assert np.nanmax(kept) == np.nanmax(stretch)


def test_a_single_spike_of_two_metrics_stays() -> None:
    loss, norm = np.ones(100_000), np.ones(100_000)
    loss[54_321], norm[777] = 40.0, -3.0
    rows = extreme_rows([loss, norm], 100_000, 1_000)
    assert {54_321, 777} <= set(rows.tolist())
    assert len(rows) <= 5 * 100 + 1


def test_means_leave_out_missing_values() -> None:
    column = np.array([1.0, 3.0, np.nan, 5.0, np.nan, np.nan, 9.0])
    np.testing.assert_array_equal(stretch_means(column, 2), [2.0, 5.0, np.nan, 9.0])

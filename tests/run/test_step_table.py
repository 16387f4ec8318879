"""Reading metrics.jsonl as columns while it grows, whatever it has; the best step."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from rungs.run.step_table import BestStep, StepTable
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


def test_parts_are_in_the_order_of_the_file(tmp_path: Path) -> None:
    """So that a chart has the same colours each time."""
    path, names = tmp_path / "metrics.jsonl", [*"qwertyuiop"]
    path.write_text(lines(step(0), step(1, rewards=dict.fromkeys(names, 0.5))))
    table = StepTable.read(path)
    assert [*table.parts("rewards")] == names
    assert np.isnan(table.column("rewards.q")[0])
    assert np.isnan(table.column("unknown")).tolist() == [True, True]


def test_parts_of_parts_are_columns(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    validation = {"pass_at": {"1": 0.5, "8": 1.0}, "interval": [0.4, 0.6], "a": {"b": {"c": 2}}}
    path.write_text(lines(step(0), step(1, validation=validation), step(2, validation={"a": 3})))
    columns = StepTable.read(path).columns
    assert {name for name in columns if name.startswith("validation")} == {
        "validation.pass_at.1",
        "validation.pass_at.8",
        "validation.a",
        "validation.a.b.c",
    }
    np.testing.assert_array_equal(columns["validation.pass_at.8"], [np.nan, 1.0, np.nan])


def best_of(folder: Path, interval: int, *steps: dict[str, Any]) -> BestStep | None:
    (folder / "metrics.jsonl").write_text(lines(*steps))
    return StepTable.read(folder / "metrics.jsonl").best(interval)


def test_the_best_step_has_a_checkpoint(tmp_path: Path) -> None:
    trained = [step(n, train_loss=5 - n) for n in range(5)]
    assert best_of(tmp_path, 3, *trained) == BestStep("train_loss", 4, 1.0)
    assert best_of(tmp_path, 2, *trained[:4]) == BestStep("train_loss", 3, 2.0)
    losses = ((9.0, 2.0), (0.1, None), (8.0, 1.0), (7.0, 1.5))
    validated = [
        step(n, train_loss=one, validation_loss=other) for n, (one, other) in enumerate(losses)
    ]
    assert best_of(tmp_path, 2, *validated) == BestStep("validation_loss", 2, 1.0)
    assert best_of(tmp_path, 1, step(0, train_loss=None)) is None
    assert best_of(tmp_path, 1) is None


def test_the_best_step_is_chosen_among_losses_on_the_same_validation_data(tmp_path: Path) -> None:
    def on(data: str | None, number: int, loss: float) -> dict[str, Any]:
        return step(number, train_loss=5.0, validation_loss=loss, validation_data=data)

    steps = [on("easy", 0, 0.4), on("hard", 1, 2.0), step(2), on("hard", 3, 2.5)]
    assert best_of(tmp_path, 1, *steps) == BestStep("validation_loss", 1, 2.0)
    of_an_earlier_version = [on(None, 0, 1.0), on("hard", 1, 2.0)]
    assert best_of(tmp_path, 1, *of_an_earlier_version) == BestStep("validation_loss", 0, 1.0)

"""The ladder: its runs, its statistics, its table and pictures."""

import json
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from matplotlib.image import imread

from benchmarks import ladder
from benchmarks.ladder import DISTILLATION, LADDER, RECIPE, TABLES, Table
from benchmarks.losses.ladder_charts import draw_ladder
from benchmarks.losses.rung import Rung, interval
from rungs.run.metrics import StepMetrics
from tests.support.committed_runs import ROOT

NAMES = list(LADDER.adds)


def steps(final: float) -> list[StepMetrics]:
    """Three steps, of which the first and the last have a validation."""
    first, last = {"validation_loss": 8.0, "bits_per_byte": 3.0}, {"validation_loss": final}
    values: list[dict[str, float]] = [first, {}, last | {"bits_per_byte": final / 2}]
    return [
        StepMetrics(
            global_step=number,
            tokens_seen=100 * (number + 1),
            train_loss=1.0,
            learning_rate=0.1,
            gradient_norm=1.0,
            clipped=False,
            dropped_microbatches=0,
            step_seconds=60.0,
            tokens_per_second=1.0,
            **value,  # type: ignore[arg-type]
        )
        for number, value in enumerate(values)
    ]


def rung(name: str, *finals: float) -> Rung:
    return Rung.of(name, [steps(final) for final in finals])


def test_a_rung_is_read_from_the_steps_of_its_runs() -> None:
    result = rung("norm", 4.0, 4.5, 5.0)
    assert result.losses.tolist() == [4.0, 4.5, 5.0]
    assert result.curve.tolist() == [8.0, 4.5]
    assert result.tokens.tolist() == [100, 300]
    assert (result.bits_per_byte, result.seconds) == (2.25, 180.0)


def test_the_interval_is_students() -> None:
    values = np.asarray([4.0, 4.1, 4.5])
    low, high = scipy.stats.t.interval(0.95, 2, values.mean(), scipy.stats.sem(values))
    assert interval(values) == pytest.approx((high - low) / 2, rel=1e-12)


def test_gains_are_paired_by_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds differ by much more than the gain does."""
    page = tmp_path / "README.md"
    kept = f"| `{NAMES[2]}` | measured before |"
    page.write_text(f"# The ladder\n\n{LADDER.begin}\nold\n{kept}\n{ladder.END}\nMore.\n")
    monkeypatch.setattr(ladder, "PAGE", page)
    ladder.write_table(LADDER, [rung(NAMES[0], 4.0, 5.0, 6.0), rung(NAMES[1], 3.9, 4.9, 5.9)])
    text = page.read_text()
    assert text.startswith("# The ladder\n")
    assert text.endswith("\nMore.\n")
    assert "old" not in text
    first, second, third = text.splitlines()[6:9]
    assert f"| `{NAMES[0]}` | {LADDER.adds[NAMES[0]]} | 5.000 ± 2.484 |  | 2.500 | 3.0 |" == first
    assert "| 0.100 ± 0.000 |" in second
    assert third == kept


def test_pictures_are_drawn(tmp_path: Path) -> None:
    draw_ladder([rung(NAMES[0], 4.0, 5.0, 4.1), rung(NAMES[1], 3.9, 4.8, 4.0)], tmp_path)
    for path in sorted(tmp_path.iterdir()):
        assert imread(path).std() > 0.05
    assert len(list(tmp_path.iterdir())) == 2


def test_rungs_differ_in_what_they_add_and_train_alike() -> None:
    """One budget for all: the data and every setting but the optimizer and its learning rate."""
    trains = [json.loads((ROOT / "runs" / name / "train.json").read_text()) for name in NAMES]
    for train in trains:
        train.pop("optimizer", None)
    rates = {train.pop("learning_rate") for train in trains}
    assert all(train == trains[0] for train in trains)
    assert len(rates) <= 2
    configs = [(ROOT / "runs" / name / "model.json").read_text() for name in NAMES]
    muon = NAMES.index("muon")
    assert configs[muon] == configs[muon - 1]
    assert len(set(configs)) == len(NAMES) - 1


@pytest.mark.parametrize("name", list(RECIPE.adds))
def test_a_change_of_the_recipe_changes_only_the_keys_that_the_recipe_has(name: str) -> None:
    def keys(run: str) -> set[tuple[str, str]]:
        files = ("model.json", "train.json")
        texts = ((ROOT / "runs" / run / file).read_text() for file in files)
        return {(key, str(value)) for text in texts for key, value in json.loads(text).items()}

    base, recipe = keys("qk-norm"), keys("recipe")
    changed = {key for key, _ in keys(name) - base}
    assert changed <= {key for key, _ in recipe - base}
    assert bool(changed) == (name != RECIPE.base)


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_page_has_the_table_of_the_committed_runs(table: Table) -> None:
    page = (ROOT / "runs" / "README.md").read_text(encoding="utf-8")
    text = page.partition(table.begin)[2].partition(ladder.END)[0]
    rows = [line.split("|")[1:-1] for line in text.strip().splitlines()[2:]]
    expected = [(f"`{name}`", adds) for name, adds in table.adds.items()]
    found = [(cells[0].strip(), cells[1].strip()) for cells in rows]
    assert found == expected


def test_gains_are_over_the_rung_below_or_over_the_base() -> None:
    assert LADDER.below("next-token") is None
    assert LADDER.below("norm") == "attention"
    assert RECIPE.below("qk-norm") is None
    assert {RECIPE.below(name) for name in [*RECIPE.adds][1:]} == {"qk-norm"}
    assert RECIPE.with_below(["normuon"]) == ["qk-norm", "normuon"]
    assert LADDER.with_below(["norm", "next-token"]) == ["next-token", "attention", "norm"]
    assert DISTILLATION.with_below([]) == ["student", "distilled"]
    assert DISTILLATION.below("student") is None
    assert DISTILLATION.below("distilled") == "student"


def test_runs_of_a_table_are_the_committed_ones_with_its_keys(tmp_path: Path) -> None:
    def made(table: Table, name: str) -> dict[str, object]:
        keys = json.loads(table.run(name, 1, tmp_path).texts["train.json"])
        return {key: value for key, value in keys.items() if key != "lineage"}

    assert made(RECIPE, "qk-norm") == made(LADDER, "qk-norm") | {"max_steps": 904}
    assert RECIPE.path("qk-norm", 1, tmp_path) != LADDER.path("qk-norm", 1, tmp_path)
    teacher = {"objective": "distill", "teacher": str(LADDER.path("qk-norm", 0, tmp_path))}
    assert made(DISTILLATION, "distilled") == made(DISTILLATION, "student") | teacher

"""What each kind of experiment finds, in simulated runs whose truth is known."""

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from rungs.common.errors import UserError
from rungs.config.run_config import load_run
from rungs.experiments.scaling import Scaling
from rungs.experiments.verdict import Judgement
from rungs.planning.flops import count_active_parameters
from rungs.step.state import shapes_of
from tests.support.simulated_runs import Simulated, conduct, make_experiment, noisy

BEST_RATE = 0.02


def by_rate(changes: Mapping[str, Any]) -> float:
    """A parabola over the logarithm of the learning rate."""
    return 3 + 0.2 * math.log10(changes.get("learning_rate", 0.002) / BEST_RATE) ** 2


def test_a_grid_names_its_best_cell(tmp_path: Path) -> None:
    grid = {"learning_rate": [0.002, 0.02, 0.2], "weight_decay": [0.0, 0.1]}
    folder = make_experiment(tmp_path, kind="grid", grid=grid)
    engine = Simulated(noisy(by_rate, 0.0))
    _, conductor = conduct(folder, engine)
    assert len(conductor.outcomes) == conductor.experiment.most_runs()
    assert engine.trained[1] == "learning_rate=0.002,weight_decay=0.1-seed0"
    (line,) = conductor.experiment.conclusions(conductor.outcomes)
    assert "best of 6 combinations is learning_rate=0.02,weight_decay=0.0 with 3.0000" in line
    assert (folder.path / "heat-map.png").exists()
    heading, _, best, *_ = re.findall(r"\|.*\|", (folder.path / "report.md").read_text())
    assert heading == "| run | validation loss | seeds | tokens/s | minutes |"
    assert best.startswith("| learning_rate=0.02,weight_decay=0.0 | 3.0000 |")


def test_a_grid_says_that_its_best_value_is_the_last(tmp_path: Path) -> None:
    grid = {"learning_rate": [0.0002, 0.002, 0.02], "weight_decay": [0.0, 0.1]}
    folder = make_experiment(tmp_path, kind="grid", grid=grid)
    _, conductor = conduct(folder, Simulated(noisy(by_rate, 0.0)))
    _, line = conductor.experiment.conclusions(conductor.outcomes)
    assert line == "learning_rate 0.02 is at an end of its values: try others beyond it."


SEARCH: dict[str, Any] = {
    "kind": "search",
    "ranges": {
        "learning_rate": {"from": 0.0005, "to": 0.5, "log": True},
        "weight_decay": [0.0, 0.1],
    },
    "runs": 16,
}


class TestSearch:
    @pytest.fixture(autouse=True)
    def needs_optuna(self) -> None:
        pytest.importorskip("optuna", reason="needs `uv run --extra search`")

    def test_it_finds_the_best_rate_and_confirms_it(self, tmp_path: Path) -> None:
        folder = make_experiment(tmp_path, **SEARCH, confirm=4)
        _, conductor = conduct(folder, Simulated(noisy(by_rate, 0.002)))
        assert len(conductor.outcomes) == conductor.experiment.most_runs()
        (comparison,) = conductor.experiment.comparisons(conductor.outcomes)
        assert comparison.verdict.judgement is Judgement.BETTER
        winner = next(one for one in conductor.outcomes.values() if one.group == "winner")
        assert BEST_RATE / 3 < winner.changes["learning_rate"] < BEST_RATE * 3
        seeds = {one.group: one.seed for one in conductor.outcomes.values()}
        assert seeds["winner"] == 103  # none of those that chose

    def test_a_killed_search_proposes_what_it_would_have(self, tmp_path: Path) -> None:
        keys = {**SEARCH, "runs": 9, "at_once": 2}
        whole = make_experiment(tmp_path / "whole", **keys)
        _, expected = conduct(whole, Simulated(noisy(by_rate)))
        killed = make_experiment(tmp_path / "killed", **keys)
        for _ in range(30):
            engine = Simulated(noisy(by_rate))
            engine.stops_after = 1
            try:
                _, found = conduct(killed, engine)
                break
            except KeyboardInterrupt:
                pass
        assert found.outcomes.proposals == expected.outcomes.proposals
        assert {k: v.value for k, v in found.outcomes.items()} == {
            k: v.value for k, v in expected.outcomes.items()
        }

    def test_a_program_can_ask_it(self, tmp_path: Path) -> None:
        (tmp_path / "ranges.json").write_text(json.dumps(SEARCH["ranges"]))
        program = ["-m", "rungs.experiments.optuna_proposer", str(tmp_path / "ranges.json")]
        keys = {"kind": "propose", "proposer": [sys.executable, *program], "runs": 3}
        _, conductor = conduct(make_experiment(tmp_path, **keys), Simulated(noisy(by_rate)))
        rates = [(one.changes or {})["learning_rate"] for one in conductor.outcomes.proposals]
        assert len(set(rates)) == 3
        assert all(0.0005 <= rate <= 0.5 for rate in rates)

    def test_halving_goes_on_with_the_best(self, tmp_path: Path) -> None:
        keys = {**SEARCH, "runs": 6, "halving": {"steps": [5, 10, 20], "keep": 0.34}}
        folder = make_experiment(tmp_path, **keys)
        engine = Simulated(noisy(by_rate, 0.0))
        _, conductor = conduct(folder, engine)
        by_group = {one.group: one for one in conductor.outcomes.values()}
        measured = {
            steps: [one for group, one in by_group.items() if group.endswith(f" at {steps}")]
            for steps in (5, 10, 20)
        }
        assert {steps: len(found) for steps, found in measured.items()} == {5: 6, 10: 3, 20: 2}
        values = {
            steps: sorted(one.value for one in found if one.value is not None)
            for steps, found in measured.items()
        }
        assert values[10] == values[5][:3]
        trials = {one.name: one for one in conductor.experiment.trials(conductor.outcomes)}
        last = trials[measured[20][0].run]
        assert last.changes["max_steps"] == 20
        assert last.branch is not None
        trunk = trials[last.branch[0]]
        assert (trunk.changes["max_steps"], last.branch[1]) == (16, 15)
        assert trunk.branch is not None
        assert trunk.branch[1] == 7  # the run until 8 steps goes on


def test_a_mixture_is_found(tmp_path: Path) -> None:
    """log loss on v = 1 + Σ k · weight, where each dataset helps itself, and b helps all."""
    coefficients = {"a": {"a": -0.5, "b": -0.35, "c": 0.1}, "b": {"a": 0.1, "b": -0.4, "c": 0.1}}

    def losses(dataset: Mapping[str, float]) -> dict[str, float]:
        total = sum(dataset.values())
        return {
            name: math.exp(1 + sum(k * dataset[of] / total for of, k in row.items()))
            for name, row in (coefficients | {"c": coefficients["b"]}).items()
        }

    class OfMixtures(Simulated):
        def _train(self, job: Any) -> int:
            code = super()._train(job)
            path = Path(job.folder) / "metrics.jsonl"
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            dataset = json.loads((Path(job.folder) / "train.json").read_text())["dataset"]
            lines[-1]["validation_losses"] = losses(dataset)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            return code

    folder = make_experiment(tmp_path, kind="mixture", datasets=["a", "b", "c"], runs=8)
    for name in ("a", "b", "c"):
        (tmp_path / "datasets" / name).symlink_to(tmp_path / "datasets" / "tiny")
    _, conductor = conduct(folder, OfMixtures(lambda *_: 3.0))
    assert len(conductor.outcomes) == conductor.experiment.most_runs()
    winner = next(one for one in conductor.outcomes.values() if one.group == "winner")
    weights = np.array(list(winner.changes["dataset"].values()))
    assert weights[1] / weights.sum() > 0.95  # b is best for every dataset together
    (comparison,) = conductor.experiment.comparisons(conductor.outcomes)
    assert comparison.verdict.judgement is Judgement.BETTER
    lines = conductor.experiment.conclusions(conductor.outcomes)
    # log loss on a = Σ (1 + k) · weight, as weights add up to 1
    assert lines[0].startswith("log loss on a = (0.500 ± 0.000) · a + (0.650 ± 0.000) · b")


@pytest.mark.long
def test_scaling_finds_the_law(tmp_path: Path) -> None:
    """Loss = 1.7 + 400 ÷ N^0.34 + 410 ÷ D^0.28 (Hoffmann et al. 2022, equation 10), for which the
    best N grows with C^(0.28 ÷ 0.62)."""
    keys: dict[str, Any] = {"budgets": [1e11, 1e12, 1e13], "sizes": 7, "predict": 1e14}
    changes = {"epochs": 10**6, "feed_forward": "swiglu"}
    folder = make_experiment(tmp_path, kind="scaling", **keys, changes=changes)
    base = tmp_path / "base"
    model = {**json.loads((base / "model.json").read_text()), "mup": {"base_emb_dim": 32}}
    (base / "model.json").write_text(json.dumps(model))

    class OfSizes(Simulated):
        def _train(self, job: Any) -> int:
            super()._train(job)
            config = load_run(job.folder)
            size = count_active_parameters(shapes_of(config.model, None), config.model).total
            assert f"-{size:,}-parameters" in Path(job.folder).name
            tokens = (config.train.max_steps or 0) * config.tokens_per_step
            loss = 1.7 + 400 / size**0.34 + 410 / tokens**0.28
            self.loss = lambda *_: loss
            return super()._train(job)

    _, conductor = conduct(folder, OfSizes(lambda *_: 3.0))
    assert len(conductor.outcomes) == conductor.experiment.most_runs()
    experiment = conductor.experiment
    assert isinstance(experiment, Scaling)
    lines = experiment.conclusions(conductor.outcomes)
    exponent = float(lines[0].split("C^")[1].split()[0])
    assert exponent == pytest.approx(0.28 / 0.62, abs=0.05)
    assert (folder.path / "scaling.png").exists()
    assert "For 1e+14 FLOPs: " in lines[1]


class TestPropose:
    PROGRAM = """
import json, sys
known = json.load(sys.stdin)
rates = [0.004, 0.02, 0.2]
number = len(known["proposals"])
if known["errors"] or number < 2:
    print(json.dumps({"changes": {"learning_rate": rates[number]}, "why": "a larger rate"}))
else:
    print(json.dumps({"changes": {"learnig_rate": 1}}))
"""

    def folder(self, tmp_path: Path, program: str, **keys: Any) -> Any:
        (tmp_path / "propose.py").write_text(program)
        proposer = [sys.executable, str(tmp_path / "propose.py")]
        return make_experiment(tmp_path, kind="propose", proposer=proposer, runs=3, **keys)

    def test_better_ideas_are_kept_and_the_last_is_confirmed(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, self.PROGRAM, smallest_effect=0.01)
        engine = Simulated(noisy(by_rate, 0.001))
        _, conductor = conduct(folder, engine)
        assert [one.changes for one in conductor.outcomes.proposals] == [
            {"learning_rate": 0.004},
            {"learning_rate": 0.02},
            {"learning_rate": 0.2},  # the second try: the first had an unknown key
        ]
        (comparison,) = conductor.experiment.comparisons(conductor.outcomes)
        assert comparison.verdict.judgement is Judgement.BETTER
        winner = next(one for one in conductor.outcomes.values() if one.group == "winner")
        assert winner.changes["learning_rate"] == 0.02
        assert conduct(folder, Simulated(noisy(by_rate)))[0] == 0  # asks nothing again

    def test_three_wrong_answers_count_as_a_discarded_proposal(self, tmp_path: Path) -> None:
        wrong = 'print(\'{"changes": {"seed": 3}}\')'
        _, conductor = conduct(self.folder(tmp_path, wrong), Simulated(noisy(by_rate)))
        assert [one.changes for one in conductor.outcomes.proposals] == [None] * 3
        assert "seed: the experiment decides this" in conductor.outcomes.proposals[0].why
        assert "None of 3 proposals" in conductor.experiment.conclusions(conductor.outcomes)[0]

    def test_a_proposer_that_fails_ends_the_experiment(self, tmp_path: Path) -> None:
        folder = self.folder(tmp_path, "raise SystemExit('no more ideas')")
        with pytest.raises(UserError, match="exit code 1: no more ideas"):
            conduct(folder, Simulated(noisy(by_rate)))


RECORD: dict[str, Any] = {"kind": "record", "target": 3.0, "budget": {"tokens": 3072}}


@pytest.mark.parametrize(
    ("mean", "deviation", "said"),
    [
        (2.97, 0.001, "A record: the mean of 4 seeds is"),
        (2.97, 0.05, "No record: the mean of 4 seeds is"),
        (3.03, 0.001, "No record: the mean of 4 seeds is 0.0"),
    ],
)
def test_a_record_is_below_its_target_beyond_doubt(
    mean: float, deviation: float, said: str, tmp_path: Path
) -> None:
    folder = make_experiment(tmp_path, **RECORD, seeds=4)
    _, conductor = conduct(folder, Simulated(noisy(lambda _: mean, deviation)))
    values = [one.value for one in conductor.outcomes.values()]
    p = stats.ttest_1samp(values, 3.0, alternative="less").pvalue
    (line,) = conductor.experiment.conclusions(conductor.outcomes)
    assert line.startswith(said)
    assert f"p = {p:.2g}, after 3,072 tokens each" in line
    assert line.startswith("A record") == (p < 0.01)


def test_a_record_has_a_price(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, **{**RECORD, "budget": {"steps": 24}})
    with pytest.raises(UserError, match="budget: a record is of tokens, minutes or flops"):
        folder.load()

"""Experiments from the first run to the verdict, with simulated runs; a real one at the end."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rungs.common.errors import UserError
from rungs.common.signals import StopSignal
from rungs.experiments import charts, table
from rungs.experiments.experiment import Comparison, Experiment, Outcome, Outcomes
from rungs.experiments.reproduction import reproduce
from rungs.experiments.verdict import Judgement
from rungs.experiments.workers import Job, Local, to_its_end
from tests.support.committed_runs import ROOT
from tests.support.simulated_runs import Simulated, conduct, make_experiment, noisy

LOSSES = {0.01: 3.0, 0.02: 2.9, 0.001: 3.3}
VARIANTS = {
    "same": {"weight_decay": 0.01},
    "fast": {"learning_rate": 0.02},
    "slow": {"learning_rate": 0.001},
}
TIMES = "minutes", "tokens_per_second", "device", "commit", "checksum"


def by_rate(changes: Mapping[str, Any]) -> float:
    return LOSSES[changes.get("learning_rate", 0.01)]


def judgements(found: list[Comparison]) -> dict[str, str]:
    return {one.group: str(one.verdict.judgement) for one in found}


def ledger(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
    return [{k: v for k, v in line.items() if k not in TIMES} for line in lines]


def test_variants_are_judged_by_seed(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, variants=VARIANTS, seeds=5, smallest_effect=0.05)
    engine = Simulated(noisy(by_rate))
    code, conductor = conduct(folder, engine)
    assert code == 0
    assert engine.trained[:4] == ["base-seed0", "same-seed0", "fast-seed0", "slow-seed0"]
    found = judgements(conductor.experiment.comparisons(conductor.outcomes))
    assert found == {"same": "no different", "fast": "better", "slow": "worse"}
    report = (folder.path / "report.md").read_text()
    assert "| fast | 2.9" in report
    assert "| better |" in report
    assert "[2.9" in report
    names = {path.name for path in folder.path.iterdir()}
    assert names >= {"effects.png", "curves.png", "table.tex", "table.csv", "report.html"}
    assert "http" not in (folder.path / "report.html").read_text()


def test_what_is_there_is_not_trained_again(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, variants=VARIANTS)
    conduct(folder, Simulated(noisy(by_rate)))
    before = folder.ledger.read_bytes()
    engine = Simulated(noisy(by_rate))
    assert conduct(folder, engine)[0] == 0
    assert not engine.trained
    assert folder.ledger.read_bytes() == before


def test_the_table_is_the_same_whichever_worker_ends_first(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, variants=VARIANTS)
    _, conductor = conduct(folder, Simulated(noisy(by_rate)))
    other_way = Outcomes(dict(reversed(conductor.outcomes.items())))
    found, expected = (
        table.as_csv(conductor.experiment, table.rows(conductor.experiment, outcomes))
        for outcomes in (other_way, conductor.outcomes)
    )
    assert found == expected


@pytest.mark.parametrize(
    ("measure", "curve", "label"),
    [
        ("validation_loss", [(0.0, 8.0), (9.0, 4.0)], "validation loss (nats per token)"),
        ("pass_at_1", [(0.0, 0.2), (9.0, 0.9)], "pass@1 (share of right answers)"),
        ("train_loss", [], "validation loss (nats per token)"),
    ],
)
def test_curves_are_of_what_the_runs_have(
    measure: Any, curve: list[tuple[float, float]], label: str
) -> None:
    experiment = Experiment(kind="table", base="runs/a", measure=measure)
    runs = [
        Outcome("base", seed, f"base-seed{seed}", {}, 0.9, None, curve=curve) for seed in (0, 1)
    ]
    axes = charts.curves([("base", runs)], experiment).axes[0]
    assert axes.get_ylabel() == label
    found = [np.asarray(line.get_ydata()).tolist() for line in axes.lines]
    assert found == [[y for _, y in curve]] * bool(curve)


@pytest.mark.parametrize("seeds", [3, {"from": 3, "to": 6}])
def test_an_experiment_killed_after_any_run_ends_as_if_nothing_had_happened(
    seeds: object, tmp_path: Path
) -> None:
    whole = make_experiment(tmp_path / "whole", variants=VARIANTS, seeds=seeds)
    conduct(whole, Simulated(noisy(by_rate)))
    killed = make_experiment(tmp_path / "killed", variants=VARIANTS, seeds=seeds)
    for _ in range(30):
        engine = Simulated(noisy(by_rate))
        engine.stops_after = 2
        try:
            conduct(killed, engine)
            break
        except KeyboardInterrupt:
            with killed.ledger.open("a") as file:
                file.write('{"entry": "run", "gro')  # the machine died while it wrote
    assert ledger(killed.path) == ledger(whole.path)
    for name in ("report.md", "table.csv", "table.tex"):
        found, expected = ((each.path / name).read_text() for each in (killed, whole))
        assert found.replace(str(tmp_path / "killed"), "") == expected.replace(
            str(tmp_path / "whole"), ""
        )


def test_seeds_are_added_until_there_is_a_verdict(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, variants=VARIANTS, seeds={"from": 3, "to": 12})
    engine = Simulated(noisy(by_rate))
    _, conductor = conduct(folder, engine)
    found = judgements(conductor.experiment.comparisons(conductor.outcomes))
    assert (found["fast"], found["slow"]) == ("better", "worse")
    seeds = {name: sum(one.startswith(name) for one in engine.trained) for name in VARIANTS}
    assert seeds["slow"] < seeds["same"] == 12 == sum("base" in one for one in engine.trained)


def test_a_ladder_compares_each_rung_with_the_one_before(tmp_path: Path) -> None:
    variants = {"decay": {"weight_decay": 0.1}, "fast": {"learning_rate": 0.02}}
    folder = make_experiment(tmp_path, variants=variants, ladder=True, leave_one_out=True)
    _, conductor = conduct(folder, Simulated(noisy(by_rate)))
    trials = {one.group: one.changes for one in conductor.experiment.trials(conductor.outcomes)}
    assert trials["fast"]["weight_decay"] == 0.1
    assert "weight_decay" not in trials["without decay"]
    found = {
        (one.group, one.against) for one in conductor.experiment.comparisons(conductor.outcomes)
    }
    assert found == {("decay", "base"), ("fast", "decay"), ("without decay", "fast")}


def test_a_run_that_fails_is_a_row_and_is_tried_again(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, variants={"nan": {"learning_rate": 1.0}})
    code, conductor = conduct(
        folder, Simulated(lambda c, _: 3.0 if "learning_rate" not in c else float("nan"))
    )
    assert code == 1
    (comparison,) = conductor.experiment.comparisons(conductor.outcomes)
    assert comparison.verdict.judgement is Judgement.FAILED
    assert "| nan | ended with exit code 1 |" in (folder.path / "report.md").read_text()
    engine = Simulated(lambda *_: 2.0)
    assert conduct(folder, engine)[0] == 0
    assert engine.trained == ["nan-seed0", "nan-seed1", "nan-seed2"]


def test_minutes_are_compared_on_one_kind_of_device(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, variants=VARIANTS, budget={"minutes": 1.0})
    engine = Simulated(noisy(by_rate), "fast one")
    engine.stops_after = 2
    with pytest.raises(KeyboardInterrupt):
        conduct(folder, engine)
    with pytest.raises(UserError, match="devices of one kind; fast-seed0 was trained on slow one"):
        conduct(folder, Simulated(noisy(by_rate), "slow one"))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({}, "variants: missing"),
        ({"kind": "comparison"}, "no experiment is called 'comparison'; did you mean compare"),
        ({"variants": {"a": {"learnig_rate": 1}}}, "learnig_rate: unknown key"),
        (
            {"variants": VARIANTS, "seeds": 1},
            r"seeds: 1 is not allowed; must be at least 2 or must be an object {…}$",
        ),
        ({"variants": VARIANTS, "seeds": {"from": 5, "to": 3}}, "is less than from"),
        (
            {"variants": VARIANTS, "measure": "loss"},
            r"'bits_per_byte' or 'pass_at_1' or must be an object {…}$",
        ),
        ({"variants": VARIANTS, "measure": {"tokens_to": -1, "score": "a"}}, "tokens_to: -1 is"),
        (
            {"variants": VARIANTS, "measure": {"tokens_to": 3, "minutes_to": 3}},
            "give one of min.*$",
        ),
        ({"variants": VARIANTS, "measure": {"score": 1}}, "score: 1 is not .* type string"),
        ({"variants": VARIANTS, "seeds": {"from": 1, "to": 3}}, r"^[^\n]*seeds.from: 1 [^\n]*$"),
        ({"variants": VARIANTS, "budget": {"steps": 5, "tokens": 5}}, "has 2 of steps, tokens"),
        (
            {"variants": VARIANTS, "budget": {"steps": 10**6}},
            "more than the 24 that its data has",
        ),
        ({"variants": {"base": {}}}, "would have the folders of another one"),
        ({"variants": VARIANTS, "leave_one_out": True}, "leave_one_out: needs ladder"),
        ({"variants": {"a": "nosuch"}}, "nosuch: no such run folder"),
        ({"kind": "grid", "grid": {"seed": []}}, "a key has no values"),
        ({"kind": "grid", "grid": {"weight_decay": [0.1, 0.1]}}, "a value is there twice"),
        ({"kind": "mixture", "datasets": ["a", "b", "c"], "runs": 4}, "too few for 3 datasets"),
        ({"kind": "scaling", "budgets": [1e9, 1e10]}, "has no mup"),
        ({"kind": "search", "runs": 3, "ranges": {"beta1": {"from": 0.9, "to": 0.1}}}, "must rise"),
    ],
)
def test_wrong_experiments_are_refused_before_anything_trains(
    keys: dict[str, Any], line: str, tmp_path: Path
) -> None:
    folder, engine = make_experiment(tmp_path, **keys), Simulated(noisy(by_rate))
    with pytest.raises(UserError, match=line) as refused:
        conduct(folder, engine)
    assert "function-" not in str(refused.value)  # pydantic's name for a kind of a union
    assert [path.name for path in folder.path.iterdir()] == ["experiment.json"]


@pytest.mark.parametrize("edit", ["value", "removed", "added"])
def test_an_edited_ledger_is_refused(edit: str, tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, variants=VARIANTS)
    conduct(folder, Simulated(noisy(by_rate)))
    lines = folder.ledger.read_text().splitlines(keepends=True)
    if edit == "value":
        lines[3] = lines[3].replace('"value": 3', '"value": 2')
    elif edit == "removed":
        del lines[2]
    else:
        lines.insert(2, lines[1])
    folder.ledger.write_text("".join(lines))
    with pytest.raises(UserError, match=r"ledger.jsonl: line [34]: was changed"):
        conduct(folder, Simulated(noisy(by_rate)))


def test_an_experiment_that_has_begun_can_not_change(tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, variants=VARIANTS)
    conduct(folder, Simulated(noisy(by_rate)))
    before, unmade = folder.ledger.read_bytes(), Simulated(noisy(by_rate))
    for keys, line in (
        ({"variants": {**VARIANTS, "fast": {"learning_rate": 0.001}}}, "fast-seed0 has other keys"),
        ({"variants": {"slow": VARIANTS["slow"]}}, "fast-seed0, which is in the ledger, is not"),
        ({"seeds": 4}, "base-seed3 is not among the runs that gave the verdicts"),
        ({"smallest_effect": 10.0}, "the verdict on same was undecided, and would be no different"),
    ):
        make_experiment(tmp_path, **{"variants": VARIANTS, "seeds": 3} | keys)
        with pytest.raises(UserError, match=line):
            conduct(folder, unmade)
    assert not unmade.trained
    assert folder.ledger.read_bytes() == before


def test_more_seeds_may_follow_if_verdicts_hold_at_each_look(tmp_path: Path) -> None:
    same = {"same": {"learning_rate": 0.003}}
    folder = make_experiment(tmp_path, variants=same, seeds={"from": 2, "to": 3})
    conduct(folder, Simulated(noisy(lambda _: 3.0)))
    make_experiment(tmp_path, variants=same, seeds={"from": 2, "to": 4})
    conduct(folder, engine := Simulated(noisy(lambda _: 3.0)))
    assert engine.trained == ["base-seed3", "same-seed3"]


@pytest.mark.parametrize("is_slower", [False, True])
def test_an_experiment_is_trained_again_and_compared(is_slower: bool, tmp_path: Path) -> None:
    folder = make_experiment(tmp_path, variants=VARIANTS)
    engine = Simulated(noisy(by_rate))
    with pytest.raises(UserError, match="its ledger is not complete"):
        reproduce(folder, tmp_path / "datasets", engine)
    conduct(folder, engine)
    before = [(folder.path / name).read_bytes() for name in ("ledger.jsonl", "report.md")]
    again = Simulated(noisy(lambda changes: by_rate(changes) + is_slower * len(changes)))
    text, code = reproduce(folder, tmp_path / "datasets", again)
    assert ("12 runs: all are equal, bit for bit." in text) != is_slower
    assert ("12 runs: 12 differ." in text) == is_slower
    assert (code, "The verdicts differ." in text) == (int(is_slower), is_slower)
    assert before == [(folder.path / name).read_bytes() for name in ("ledger.jsonl", "report.md")]
    assert len(again.trained) == 12
    assert reproduce(folder, tmp_path / "datasets", again) == (text, code)
    assert len(again.trained) == 12


@pytest.mark.long
def test_the_command_trains_real_runs(tmp_path: Path) -> None:
    folder = make_experiment(
        tmp_path,
        variants={"slow": {"learning_rate": 0.0001}},
        budget={"steps": 6},
        seeds=2,
        changes={"drop_rate": 0.0},
    )
    command = [sys.executable, str(ROOT / "experiment.py"), str(folder.path), "--workers", "2"]
    datasets = ["--datasets-dir", str(tmp_path / "datasets")]
    dry = subprocess.run([*command, *datasets, "--dry-run"], capture_output=True, text=True)
    assert dry.stdout.startswith("4 runs to train now, 0 done; the speed of this device")
    absent = subprocess.run([*command, "--datasets-dir", "absent"], capture_output=True, text=True)
    assert absent.returncode == 2
    assert [path.name for path in folder.path.iterdir()] == ["experiment.json"]
    done = subprocess.run([*command, *datasets], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "slow" in done.stdout
    assert len(ledger(folder.path)) == 5


def test_workers_share_the_cores_and_xla_has_as_many_threads_as_without_them(
    tmp_path: Path,
) -> None:
    program = (
        "import os; print(os.environ['NPROC'], *os.sched_getaffinity(0), file=open('{}', 'w'))"
    )
    paths = [tmp_path / name for name in ("first", "second")]
    jobs = [
        Job(str(path), (sys.executable, "-c", program.format(path)), str(tmp_path))
        for path in paths
    ]
    with StopSignal() as stop:
        assert [ended.exit_code for _, ended in Local(2).run(jobs, stop)] == [0, 0]
    cores = os.sched_getaffinity(0)
    for path in paths:
        threads, *own = map(int, path.read_text().split())
        assert threads == len(cores)
        assert len(own) <= max(1, (len(cores) + 1) // 2)
        assert cores.issuperset(own)


@pytest.mark.parametrize(
    ("codes", "expected", "starts"),
    [([-9, 143, 0], 0, 3), ([1], 1, 1), ([-9] * 9, -9, 4)],
)
def test_a_run_whose_process_is_killed_goes_on(
    codes: list[int], expected: int, starts: int
) -> None:
    left = iter(codes)
    with StopSignal() as stop:
        assert to_its_end(lambda: next(left), stop) == expected
    assert len([*left]) == len(codes) - starts

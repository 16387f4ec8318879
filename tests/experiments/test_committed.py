"""The committed experiments and records: their configs and ledgers."""

import json
from pathlib import Path

import pytest

from rungs.experiments.conduct import VERDICT, Conductor
from rungs.experiments.experiment import Outcomes
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.kinds import KINDS
from rungs.experiments.ledger import Ledger
from rungs.experiments.workers import Local
from rungs.tasks.verifier import TRUST_FLAG
from tests.support.committed_runs import ROOT

FOLDERS = sorted(path.parent for path in ROOT.glob("*/*/experiment.json"))


def shown(folder: Path) -> str:
    return folder.relative_to(ROOT).as_posix()


def test_there_is_one_of_every_kind() -> None:
    assert {ExperimentFolder(folder).load().kind for folder in FOLDERS} == set(KINDS)


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_it_calls_for_runs(folder: Path) -> None:
    experiment = ExperimentFolder(folder).load()
    assert experiment.trials(Outcomes()) or experiment.most_runs()


@pytest.mark.parametrize(
    "folder", [each for each in FOLDERS if (each / "ledger.jsonl").exists()], ids=shown
)
def test_a_ledger_has_all_runs_and_the_verdicts_that_follow(folder: Path, tmp_path: Path) -> None:
    conductor = Conductor(ExperimentFolder(folder), tmp_path, Local(1))
    assert not conductor.missing()
    assert not conductor.experiment.ask(conductor.outcomes)
    found = [one.as_json() for one in conductor.experiment.comparisons(conductor.outcomes)]
    assert Ledger(folder / "ledger.jsonl").of_kind(VERDICT) == json.loads(json.dumps(found))


@pytest.mark.parametrize("trusts", [False, True])
def test_programs_of_reinforcement_learning_run_if_they_are_trusted(
    trusts: bool, tmp_path: Path
) -> None:
    folder = ExperimentFolder(ROOT / "experiments/guess")
    conductor = Conductor(folder, tmp_path, Local(1), trusts=trusts)
    jobs = conductor._jobs(conductor.experiment.trials(Outcomes()))
    assert {TRUST_FLAG in job.command for job in jobs} == {trusts}

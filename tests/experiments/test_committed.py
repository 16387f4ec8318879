"""The committed experiments and records: configs, ledgers, and the tables of pages."""

from pathlib import Path

import pytest

from benchmarks import experiment_tables
from rungs.experiments.experiment import Outcomes
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.kinds import KINDS
from rungs.experiments.ledger import RUN, Ledger
from tests.support.committed_runs import ROOT

FOLDERS = sorted(path.parent for path in ROOT.glob("*/*/experiment.json"))
ENDED = [folder for folder in FOLDERS if (folder / "ledger.jsonl").exists()]


def shown(folder: Path) -> str:
    return folder.relative_to(ROOT).as_posix()


def test_there_is_one_of_every_kind() -> None:
    assert {ExperimentFolder(folder).load().kind for folder in FOLDERS} == set(KINDS)


@pytest.mark.parametrize("folder", FOLDERS, ids=shown)
def test_it_calls_for_runs(folder: Path) -> None:
    experiment = ExperimentFolder(folder).load()
    assert experiment.trials(Outcomes()) or experiment.most_runs()


@pytest.mark.parametrize("folder", ENDED, ids=shown)
def test_its_ledger_is_complete(folder: Path) -> None:
    experiment, ledger = ExperimentFolder(folder).load(), Ledger(folder / "ledger.jsonl")
    outcomes = Outcomes(ledger.outcomes, ledger.proposals)
    assert experiment.has_ended(outcomes)
    assert all(one["commit"] for one in ledger.of_kind(RUN))
    for trial in experiment.trials(outcomes):
        assert outcomes[trial.name].changes == trial.changes


@pytest.mark.parametrize("page", experiment_tables.PAGES, ids=shown)
def test_tables_are_those_of_the_ledgers(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert experiment_tables.with_tables(text) == text

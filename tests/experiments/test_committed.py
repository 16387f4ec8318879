"""The committed experiments and records: their configs."""

from pathlib import Path

import pytest

from rungs.experiments.experiment import Outcomes
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.kinds import KINDS
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

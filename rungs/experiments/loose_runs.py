"""Runs that belong to no experiment, as the outcomes of one."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from rungs.config.run_config import load_any_run
from rungs.experiments.experiment import Experiment, Measure, Outcomes, Trial
from rungs.experiments.outcome import outcome_of
from rungs.run.recorded_run import RecordedPolicyRun, kind_of


def outcomes_of_runs(folders: Sequence[Path]) -> tuple[Experiment, Outcomes]:
    """Return the outcomes of runs, by the names of their folders. Runs that differ only in their
    seeds are a group, with the name of the first. Raises UserError for a folder that is no run."""
    is_policy = all(kind_of(folder) is RecordedPolicyRun for folder in folders)
    measure: Measure = "pass_at_1" if is_policy else "validation_loss"
    experiment = Experiment(kind="table", base=str(folders[0]), measure=measure)
    groups: dict[str, str] = {}
    found = Outcomes()
    for folder in folders:
        model, train = load_any_run(folder)
        keys = train.model_dump(mode="json", exclude={"seed", "lineage"})
        own = json.dumps([model.model_dump(mode="json"), keys])
        name = re.sub(r"-seed-?\d+$", "", folder.resolve().name)
        if is_policy and not (run := RecordedPolicyRun.load(folder)).is_finished:
            name += f" ({run.taken} steps)"
        group = groups.setdefault(own, name)
        trial = Trial(group, train.seed, str(folder), {})
        found[str(folder)] = outcome_of(experiment, trial, folder, 0, "")
    return experiment, found

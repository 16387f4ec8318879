"""Runs that belong to no experiment, as the outcomes of one."""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from rungs.config.reinforce_config import ReinforceConfig
from rungs.config.run_config import load_any_run
from rungs.experiments.experiment import Experiment, Measure, Outcome, Outcomes, Trial
from rungs.experiments.outcome import outcome_of
from rungs.run.recorded_run import RecordedPolicyRun, kind_of


def outcomes_of_runs(folders: Sequence[Path]) -> tuple[Experiment, Outcomes]:
    """Return the outcomes of runs, by the names of their folders. Runs that differ only in their
    seeds are a group, with the name of the first. Raises UserError for a folder that is no run."""
    is_policy = all(kind_of(folder) is RecordedPolicyRun for folder in folders)
    measure: Measure = "pass_at_1" if is_policy else "validation_loss"
    experiment = Experiment(kind="table", base=str(folders[0]), measure=measure)
    groups: dict[str, list[tuple[Path, Outcome, int]]] = {}
    found = Outcomes()
    for folder in folders:
        model, train = load_any_run(folder)
        keys = train.model_dump(mode="json", exclude={"seed", "lineage"})
        own = json.dumps([model.model_dump(mode="json"), keys])
        group = re.sub(r"-seed-?\d+$", "", folder.resolve().name)
        trial = Trial(group, train.seed, str(folder), {})
        outcome = outcome_of(experiment, trial, folder, 0, "")
        steps = train.steps if isinstance(train, ReinforceConfig) else outcome.steps
        groups.setdefault(own, []).append((folder, outcome, steps))
    for runs in groups.values():
        group = runs[0][1].group
        unfinished = [(one.steps, steps) for _, one, steps in runs if one.steps < steps]
        if unfinished and len(runs) > 1:
            group += f" ({len(unfinished)} of {len(runs)} runs not finished)"
        elif unfinished:
            group += " ({:,} of {:,} steps)".format(*unfinished[0])
        found.update({str(at): dataclasses.replace(one, group=group) for at, one, _ in runs})
    return experiment, found

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
    groups: dict[str, list[tuple[Path, int]]] = {}
    found = Outcomes()
    for folder in folders:
        model, train = load_any_run(folder)
        keys = train.model_dump(mode="json", exclude={"seed", "lineage"})
        own = json.dumps([model.model_dump(mode="json"), keys])
        groups.setdefault(own, []).append((folder, train.seed))
    for of_group in groups.values():
        group = re.sub(r"-seed-?\d+$", "", of_group[0][0].resolve().name)
        if is_policy:
            group += _unfinished([RecordedPolicyRun.load(folder) for folder, _ in of_group])
        for folder, seed in of_group:
            trial = Trial(group, seed, str(folder), {})
            found[str(folder)] = outcome_of(experiment, trial, folder, 0, "")
    return experiment, found


def _unfinished(runs: Sequence[RecordedPolicyRun]) -> str:
    """Return what to add to the name of a group if not all of its runs are finished."""
    unfinished = [run for run in runs if not run.is_finished]
    if len(runs) > 1 and unfinished:
        return f" ({len(unfinished)} of {len(runs)} runs not finished)"
    return f" ({runs[0].taken} steps)" if unfinished else ""

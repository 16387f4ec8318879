"""Trains the runs of an experiment once more, and compares them with its ledger."""

from pathlib import Path

from rungs.common import disk
from rungs.common.errors import EXIT_FAILED, UserError
from rungs.common.shown_text import align_columns, counted
from rungs.experiments.conduct import Conductor
from rungs.experiments.experiment import Comparison, Outcome
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.ledger import PROPOSAL, Ledger
from rungs.experiments.workers import Engine


def reproduce(
    folder: ExperimentFolder, datasets_dir: Path, engine: Engine, *, trusts: bool = False
) -> tuple[str, int]:
    """Train all runs of an experiment in its folder `check`, or go on with that. Return a table of
    both results, and the exit code: 1 if a verdict is another one, or a run failed. Proposals are
    those of the ledger. Raises UserError if the experiment is not at its end."""
    first = Conductor(folder, datasets_dir, engine, trusts=trusts)
    if not first.outcomes or first.missing():
        raise UserError(f"{folder.path}: its ledger is not complete; run it without --check first")
    second = Conductor(_copy(folder), datasets_dir, engine, trusts=trusts)
    code = second.conduct()
    if not first.outcomes.keys() <= second.outcomes.keys():  # a signal
        return f"{second.folder.path}: the same command goes on", code
    text = [_differences(first, second), "", *second.experiment.conclusions(second.outcomes)]
    if _judgements(first) != _judgements(second):
        return "\n".join([*text, "The verdicts differ."]), EXIT_FAILED
    return "\n".join(text), code


def _copy(folder: ExperimentFolder) -> ExperimentFolder:
    copy = ExperimentFolder(folder.path / "check")
    copy.path.mkdir(exist_ok=True)
    if not copy.config.exists():
        ledger = Ledger(copy.ledger)
        for proposal in Ledger(folder.ledger).of_kind(PROPOSAL):
            ledger.add(PROPOSAL, proposal)
        disk.replace_file(copy.config, folder.config.read_text("utf-8"))
    return copy


def _differences(first: Conductor, second: Conductor) -> str:
    rows, differing = [["run", "ledger", "again"]], 0
    for name, before in first.outcomes.items():
        after = second.outcomes[name]
        differing += before.value != after.value
        rows.append([name, _shown(before), _shown(after)])
    end = "all are equal, bit for bit" if not differing else f"{differing} differ"
    return f"{align_columns(rows)}\n{counted(len(rows) - 1, 'run')}: {end}."


def _shown(outcome: Outcome) -> str:
    return outcome.why or "no result" if outcome.value is None else f"{outcome.value:.6f}"


def _judgements(conductor: Conductor) -> dict[str, str]:
    found: list[Comparison] = conductor.experiment.comparisons(conductor.outcomes)
    return {one.group: str(one.verdict.judgement) for one in found}

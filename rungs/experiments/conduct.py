"""Conducts an experiment: trains the runs that it calls for, and keeps ledger and report."""

import dataclasses
import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rungs.common.errors import EXIT_FAILED, UserError
from rungs.common.paths import checkout
from rungs.common.run_log import log
from rungs.common.shown_text import format_duration
from rungs.common.signals import StopSignal
from rungs.config.reinforce_config import TRUST_FLAG
from rungs.config.run_config import REINFORCE_FILE, RunConfig, config_files
from rungs.config.train_config import TrainConfig
from rungs.data.catalog import open_datasets
from rungs.data.tokens.loader import TrainingData
from rungs.experiments import table
from rungs.experiments.experiment import Outcome, Outcomes, Trial
from rungs.experiments.folder import ExperimentFolder
from rungs.experiments.ledger import PROPOSAL, Ledger
from rungs.experiments.outcome import outcome_of
from rungs.experiments.report import write_report
from rungs.experiments.workers import Ended, Engine, Job
from rungs.run.derive import NewRun, config_with
from rungs.run.folder import find_origin

VERDICT = "verdict"


class Conductor:
    """Conducts an experiment, whose lock is held. `trusts` is as in reinforcement learning.

    Raises:
        UserError: its ledger was edited or has a run with other keys, or a run can't be made.
    """

    def __init__(
        self, folder: ExperimentFolder, datasets_dir: Path, engine: Engine, *, trusts: bool = False
    ) -> None:
        self.folder, self.experiment, self._trusts = folder, folder.load(), trusts
        self._datasets_dir, self._engine = datasets_dir, engine
        self._ledger = Ledger(folder.ledger)
        tried = Outcomes(self._ledger.outcomes, self._ledger.proposals)
        self._refuse_changes(tried)
        ended = {name: one for name, one in tried.items() if not one.exit_code}
        self.outcomes = Outcomes(ended, tried.proposals)
        """Of the runs that need not be trained again: a failed one is tried once more."""

    def conduct(self) -> int:
        """Train what is missing and write the report after each run. Return the exit code: 128 +
        the number of a signal, 1 if a run failed, else 0."""
        with StopSignal() as stop:
            stop.begin()
            while missing := self.missing() or self._ask():
                self.check(missing)
                log.info("training %s in %s", missing[0].name, self.folder.runs)
                for job, ended in self._engine.run(self._jobs(self._ready(missing)), stop):
                    if stop.number is None:  # else the run goes on at the next start
                        self._add(missing, job, ended)
                        self._show()
                if stop.number is not None:
                    return stop.exit_code
        self._add_verdicts()
        write_report(self.folder, self.experiment, self.outcomes)
        return EXIT_FAILED if any(one.exit_code for one in self.outcomes.values()) else 0

    def missing(self) -> list[Trial]:
        """Return the runs that are called for now and have no outcome. Raises UserError if the
        ledger has a run of that name with other keys."""
        trials = self.experiment.trials(self.outcomes)
        for trial in trials:
            one = self.outcomes.get(trial.name)
            if one and dict(one.changes) != json.loads(json.dumps(dict(trial.changes))):
                raise self._changed(f"{trial.name} has other keys than in the ledger")
        return [trial for trial in trials if trial.name not in self.outcomes]

    def _refuse_changes(self, tried: Outcomes) -> None:
        """Raise UserError if the ledger has runs of another experiment, or verdicts of fewer."""
        names = {trial.name for trial in self.experiment.trials(tried)}
        if other := tried.keys() - names:
            raise self._changed(f"{min(other)}, which is in the ledger, is not one of its runs")
        is_over = self._ledger.of_kind(VERDICT) and not self.experiment.may_look_often
        if is_over and (new := names - tried.keys()):
            raise self._changed(f"{min(new)} is not among the runs that gave the verdicts")

    def _changed(self, how: str) -> UserError:
        return UserError(
            f"{self.folder.config}: {how}; an experiment that has begun can't change, so copy"
            " experiment.json to a new folder"
        )

    def _ready(self, trials: Sequence[Trial]) -> list[Trial]:
        """Return the runs that can begin: branches when the run that they go on from has ended."""
        return [one for one in trials if one.branch is None or one.branch[0] in self.outcomes]

    def _ask(self) -> list[Trial]:
        """Ask for new proposals; return the runs that they call for, none at the end."""
        while new := self.experiment.ask(self.outcomes):
            for proposal in new:
                self._ledger.add(PROPOSAL, dataclasses.asdict(proposal))
                self.outcomes.proposals.append(proposal)
            if missing := self.missing():
                return missing
        return self.missing()

    def summary(self) -> str:
        """Return the table of results, and where the report is."""
        found = table.as_text(self.experiment, table.rows(self.experiment, self.outcomes))
        conclusions = self.experiment.conclusions(self.outcomes)
        return "\n".join(["", found, "", *conclusions, str(self.folder.path / "report.html")])

    def check(self, trials: Sequence[Trial]) -> None:
        """Raise UserError, with all lines of each group's first, if a run can't be made or its data
        ends before its steps."""
        lines: list[str] = []
        refused: set[str] = set()
        first_of_group = {trial.group: trial for trial in reversed(trials)}
        for trial in (one for one in trials if one.group not in refused):
            try:
                if trial.branch is None:
                    NewRun.of(self.run(trial), find_origin(trial.origin), trial.changes)
                if first_of_group[trial.group] is trial:
                    self._check_length(trial)
            except UserError as error:
                refused.add(trial.group)
                lines += str(error).split("\n")
        for changes in self.experiment.possible_changes() if not self.outcomes else ():
            try:
                config_with(
                    find_origin(self.experiment.base), {**self.experiment.changes, **changes}
                )
            except UserError as error:
                lines += str(error).split("\n")
        if lines:
            raise UserError("\n".join(dict.fromkeys(lines)))

    def _check_length(self, trial: Trial) -> None:
        config = config_with(find_origin(trial.origin), trial.changes)
        if not isinstance(config.train, TrainConfig) or config.train.max_steps is None:
            return
        longest = config.train.model_copy(update={"max_steps": None})
        datasets = open_datasets(config.train.datasets, self._datasets_dir)
        steps = TrainingData(RunConfig(config.model, longest), datasets).total_steps
        if steps < config.train.max_steps:
            raise UserError(
                f"{trial.group}: {config.train.max_steps:,} steps are more than the {steps:,} that"
                " its data has; add epochs"
            )

    def run(self, trial: Trial) -> Path:
        """The folder of a run."""
        return self.folder.runs / trial.name

    def _jobs(self, trials: Sequence[Trial]) -> list[Job]:
        return [
            Job(str(self.run(trial)), tuple(self._command(trial)), str(Path.cwd()))
            for trial in trials
        ]

    def _command(self, trial: Trial) -> list[str]:
        if trial.branch:
            like, step = str(self.folder.runs / trial.branch[0]), [f"--from-step={trial.branch[1]}"]
        else:
            like, step = trial.origin, []
        settings = [f"--set={key}={json.dumps(value)}" for key, value in trial.changes.items()]
        is_policy = config_files(find_origin(trial.origin))[1] == REINFORCE_FILE
        command = [sys.executable, "-m", "rungs", "reinforce" if is_policy else "train"]
        own = ["--datasets-dir", str(self._datasets_dir)]
        if is_policy:
            own = [TRUST_FLAG] if self._trusts else []
        return [*command, str(self.run(trial)), "--like", like, *step, *settings, *own, "--quiet"]

    def _add(self, trials: Sequence[Trial], job: Job, ended: Ended) -> None:
        """Note a run that ended."""
        trial = next(one for one in trials if str(self.run(one)) == job.folder)
        outcome = outcome_of(self.experiment, trial, self.run(trial), *ended)
        self._refuse_other_device(outcome)
        self._ledger.add_outcome(outcome, commit=commit())
        self.outcomes[trial.name] = outcome

    def _refuse_other_device(self, outcome: Outcome) -> None:
        """Raise UserError if results depend on time, and this run had another device."""
        devices = {one.device for one in self.outcomes.values() if one.device} - {outcome.device}
        if self.experiment.is_timed and outcome.device and devices:
            raise UserError(
                f"{self.folder.path}: minutes are compared only on devices of one kind;"
                f" {outcome.run} was trained on {outcome.device}, others on {devices.pop()}"
            )

    def _show(self) -> None:
        """Write the report and log what is done and left."""
        write_report(self.folder, self.experiment, self.outcomes)
        done = len(self.outcomes)
        known = done + len(self.missing())
        most = max(known, self.experiment.most_runs())
        last = [*self.outcomes.values()][-1]
        value = self.experiment.value_of(last)
        found = last.why if value is None else f"{value:.4f}"
        minutes = [one.minutes for one in self.outcomes.values() if one.minutes]
        rest = 60 * (most - done) * sum(minutes) / len(minutes) if minutes else 0.0
        log.info(
            "%d of %s%d runs: %s: %s; about %s of training left, besides starts and charts",
            *(done, "at most " * (most > known), most, last.run, found, format_duration(rest)),
        )

    def _add_verdicts(self) -> None:
        """Note new verdicts. Raises UserError if the same runs had others."""
        noted = {
            (one["group"], one["against"], one["seeds"]): one["judgement"]
            for one in self._ledger.of_kind(VERDICT)
        }
        for comparison in self.experiment.comparisons(self.outcomes):
            (group, against, verdict), now = comparison, str(comparison.verdict.judgement)
            before = noted.get((group, against, verdict.seeds))
            if before is None:
                self._ledger.add(VERDICT, comparison.as_json())
            elif before != now:
                raise self._changed(f"the verdict on {group} was {before}, and would be {now}")


@functools.cache
def commit() -> str | None:
    """Return the commit of the code that runs, None outside of a checkout."""
    root = checkout()
    if root is None:
        return None
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
    return found.stdout.strip() or None

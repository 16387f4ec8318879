"""`"kind": "propose"`: ideas of a program or an agent, one after another, kept or discarded."""

import json
import subprocess
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from rungs.common.errors import UserError
from rungs.common.shown_text import counted
from rungs.config.base import Positive
from rungs.config.run_config import FILE_TYPES, config_files
from rungs.experiments.confirm import Proposing
from rungs.experiments.experiment import BASE, Changes, Outcomes, Proposal, Trial, run_name
from rungs.run.derive import config_with
from rungs.run.folder import find_origin

SEED = 0
TRIES = 3
"""Answers of the proposer, until one can be trained."""
FIXED = frozenset({"seed", "lineage", "$schema", "max_steps", "max_minutes"})
"""Keys that a proposal must not change, as the experiment decides them."""


class Propose(Proposing):
    """Proposals of a program."""

    kind: Literal["propose"]
    proposer: Annotated[list[str], Field(min_length=1)]
    """A command, such as `["python3", "propose.py"]`. It gets JSON on stdin, with what is known so
    far, and prints `{"changes": {…}, "why": "…"}`: new values for keys of `model.json` and of the
    file beside it; see docs/experiments.md."""
    proposer_seconds: Positive = 600.0
    """Time for each answer of the proposer."""

    def explored(self, outcomes: Outcomes) -> list[Trial]:
        valid = [one for one in outcomes.proposals if one.changes is not None]
        return [
            self.trial(BASE, SEED, {}),
            *(self.trial(one.group, SEED, one.changes or {}) for one in valid),
        ]

    def ask(self, outcomes: Outcomes) -> list[Proposal]:
        if self.is_over(outcomes):
            return []
        number, errors = len(outcomes.proposals) + 1, list[str]()
        for _ in range(TRIES):
            answer = self._answer({**self._known(outcomes), "errors": errors})
            errors = list(self._problems(answer))
            if not errors:
                return [Proposal(number, answer["changes"], str(answer.get("why", "")))]
        return [Proposal(number, None, f"nothing that can be trained: {'; '.join(errors)}")]

    def winner(self, outcomes: Outcomes) -> Changes | None:
        best = self._best(outcomes)
        return best.changes if best else None

    def conclusions(self, outcomes: Outcomes) -> list[str]:
        kept = [one.group for one, is_kept in self._decisions(outcomes) if is_kept]
        tried = counted(len(outcomes.proposals), "proposal")
        if not kept:
            return [f"None of {tried} was better than the base."]
        return [
            f"Kept of {tried}: {'; '.join(kept)}. Each was better than the best before it, with one"
            " seed; the confirmation with other seeds tells whether the last one is."
        ]

    def _decisions(self, outcomes: Outcomes) -> Iterator[tuple[Proposal, bool]]:
        """Yield each proposal that ended, and whether it was kept: better than the best before by
        more than the smallest effect."""
        sign, best = 1 if self.lower_is_better else -1, self._result(BASE, outcomes)
        for one in outcomes.proposals:
            value = self._result(one.group, outcomes)
            gain = sign * (best - value) if value is not None and best is not None else 0.0
            is_kept = gain > (self.smallest_effect or 0) or (best is None and value is not None)
            best = value if is_kept else best
            yield one, is_kept

    def _best(self, outcomes: Outcomes) -> Proposal | None:
        kept = [one for one, is_kept in self._decisions(outcomes) if is_kept]
        return kept[-1] if kept else None

    def _result(self, group: str, outcomes: Outcomes) -> float | None:
        outcome = outcomes.get(run_name(group, SEED))
        return outcome.value if outcome else None

    def _known(self, outcomes: Outcomes) -> dict[str, Any]:
        """Return what the proposer is told."""
        base, best = find_origin(self.base), self._best(outcomes)
        files = config_files(base)
        return {
            "question": self.question,
            "measure": self.model_dump(mode="json")["measure"],
            "lower_is_better": self.lower_is_better,
            "smallest_effect": self.smallest_effect,
            "base": {
                "value": self._result(BASE, outcomes),
                **{name: json.loads((base / name).read_text("utf-8")) for name in files},
            },
            "best": {"changes": best.changes if best else {}},
            "proposals": [
                {
                    "changes": one.changes,
                    "why": one.why,
                    "value": self._result(one.group, outcomes),
                    "kept": is_kept,
                }
                for one, is_kept in self._decisions(outcomes)
            ],
            "left": self.runs - len(outcomes.proposals),
            "schemas": {name: FILE_TYPES[name].model_json_schema() for name in files},
        }

    def _answer(self, known: dict[str, Any]) -> Any:
        """Return what the proposer printed, as JSON. Raises UserError if it failed."""
        try:
            ended = subprocess.run(
                self.proposer,
                input=json.dumps(known),
                capture_output=True,
                text=True,
                timeout=self.proposer_seconds,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"proposer: {' '.join(self.proposer)}: {error}") from None
        if ended.returncode:
            last = (ended.stderr.strip().splitlines() or ["it printed nothing"])[-1]
            raise UserError(
                f"proposer: {' '.join(self.proposer)}: exit code {ended.returncode}: {last}"
            )
        try:
            return json.loads(ended.stdout)
        except ValueError:
            return ended.stdout

    def _problems(self, answer: Any) -> Iterator[str]:
        """Yield why an answer can't be trained."""
        changes = answer.get("changes") if isinstance(answer, dict) else None
        if not isinstance(changes, dict) or not changes:
            yield 'print one JSON object, {"changes": {key: value, …}, "why": "…"}'
            return
        if fixed := FIXED & changes.keys():
            yield f"{', '.join(sorted(fixed))}: the experiment decides this; leave it out"
            return
        try:
            config_with(find_origin(self.base), {**self.changes, **changes})
        except UserError as error:
            yield from str(error).splitlines()

"""`ledger.jsonl`: a line for each run that ended, each verdict and each proposal, never changed
afterwards. A line has the checksum of the one before, so that a ledger that was edited is seen."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from rungs.common import disk, strict_json
from rungs.common.errors import UserError
from rungs.experiments.experiment import Outcome, Proposal

RUN, PROPOSAL = "run", "proposal"
_OUTCOME = TypeAdapter(Outcome)


class Ledger:
    """The ledger of an experiment, which may not exist yet.

    Raises:
        UserError: a line was changed, removed or added by hand, or is damaged.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entries: list[dict[str, Any]] = []
        """What each line says, by key: `entry` is its kind."""
        self._last = ""
        lines = strict_json.read_text(path).split("\n") if path.exists() else [""]
        self._torn = lines.pop()  # by a kill, else empty
        for number, line in enumerate(lines, 1):
            self._read(number, line)

    @property
    def outcomes(self) -> dict[str, Outcome]:
        """The last outcome of each run, by the name of its folder."""
        found = [_OUTCOME.validate_python(one) for one in self.of_kind(RUN)]
        return {one.run: one for one in found}

    @property
    def proposals(self) -> list[Proposal]:
        return [Proposal(**one) for one in self.of_kind(PROPOSAL)]

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return the entries of a kind, without the key that says so."""
        return [
            {key: value for key, value in one.items() if key != "entry"}
            for one in self.entries
            if one["entry"] == kind
        ]

    def add_outcome(self, outcome: Outcome, **more: Any) -> None:
        """Add a run that ended; see `add`."""
        self.add(RUN, dataclasses.asdict(outcome) | more)

    def add(self, kind: str, entry: dict[str, Any]) -> None:
        """Add a line, durably. Raises RunFailure."""
        new = {"entry": kind, **entry}
        self._last = _checksum(self._last, new)
        content = (json.dumps({**new, "checksum": self._last}) + "\n").encode()
        with disk.writing(self.path, "the ledger", len(content)), self.path.open("ab") as file:
            if self._torn:
                file.truncate(file.tell() - len(self._torn.encode()))
                self._torn = ""
            file.write(content)
            disk.flush(file)
        self.entries.append(json.loads(json.dumps(new)))

    def _read(self, number: int, line: str) -> None:
        try:
            entry = json.loads(line)
            found, self._last = entry.pop("checksum"), _checksum(self._last, entry)
            if found != self._last:
                raise ValueError
            self.entries.append(entry)
            if entry["entry"] == RUN:
                _OUTCOME.validate_python({k: v for k, v in entry.items() if k != "entry"})
        except (ValueError, KeyError, AttributeError, TypeError):
            raise UserError(
                f"{self.path}: line {number}: was changed since it was written; restore the file,"
                " or move it away and the same command writes it anew from the runs that are there"
            ) from None


def _checksum(before: str, entry: dict[str, Any]) -> str:
    return strict_json.json_checksum([before, entry])

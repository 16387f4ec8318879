"""What happened to a run, with times: `events.jsonl` in the run folder."""

from typing import Literal

from rungs.common.strict_json import StrictModel
from rungs.run import json_records
from rungs.run.folder import RunFolder

EventKind = Literal["start", "stop", "failure", "finish", "spike", "stall"]


class Event(StrictModel):
    """Something that happened to a run."""

    time: str
    """In UTC."""
    event: EventKind
    step: int
    """The last step taken; -1 before the first."""
    text: str


def read(run: RunFolder) -> list[Event]:
    """Return the events of a run, in order."""
    return json_records.read(run.events, Event)

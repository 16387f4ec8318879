"""What happened to a run, with times: `events.jsonl` in the run folder."""

from collections.abc import Mapping
from typing import Any, Literal

from rungs.common.strict_json import StrictModel
from rungs.run import json_records
from rungs.run.folder import RunFolder

EventKind = Literal["start", "stop", "failure", "finish", "spike", "stall"]


class Event(StrictModel):
    """Something that happened to a run."""

    time: str
    """When it happened, in UTC."""
    event: EventKind
    step: int
    """The last step taken; -1 before the first."""
    text: str


def append(run: RunFolder, event: Event) -> None:
    """Add an event; raises RunFailure."""
    json_records.append(run, run.events, [event])


def read(run: RunFolder) -> list[Event]:
    """Return the events of a run, in order."""
    return json_records.read(run.events, Event)


def as_message(run: RunFolder, event: Event, figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a hook gets of an event.

    Args:
        figures: the metrics of the last step.
    """
    return {"run": str(run.path.resolve()), **event.model_dump(), "figures": dict(figures)}

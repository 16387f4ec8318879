"""The events of a run: written to `events.jsonl`, and told to the hooks of the command line."""

import contextlib
import logging
import math
from collections.abc import Sequence
from typing import Any

from rungs.common.errors import RunFailure
from rungs.common.shown_text import shown
from rungs.common.text_table import format_duration
from rungs.monitoring.hooks import Hooks
from rungs.monitoring.watchdog import Watchdog
from rungs.run import records
from rungs.run.folder import RunFolder
from rungs.run.metrics import StepRecord
from rungs.run.records import Event, EventKind

log = logging.getLogger("rungs")


class Alerts:
    """Notes what happens to a run, and tells the hooks. Nothing of it can stop a step.

    Args:
        run: the run folder.
        hooks: see `Hooks`.
        last_step: the one before this start; -1 for none.
    """

    def __init__(self, run: RunFolder, hooks: Sequence[str], last_step: int) -> None:
        self._run, self._hooks = run, Hooks(hooks)
        self._step = last_step
        self._metrics: StepRecord | None = None
        self._watchdog = Watchdog(self._stalled)

    def start(self) -> None:
        """Note that training starts or resumes."""
        is_first = self._step < 0
        self.note("start", "started" if is_first else f"resumed after step {self._step:,}")
        self._watchdog.start()

    def step_taken(self, metrics: StepRecord) -> None:
        """Note a step, and if it is a loss spike."""
        self._watchdog.step_taken()
        self._step, self._metrics = metrics.global_step, metrics
        if spike := getattr(metrics, "spike", None):
            self.note("spike", "loss spike" + ", step skipped" * (spike == "skipped"))

    def note(self, kind: EventKind, text: str) -> None:
        """Write an event down and tell the hooks."""
        event = Event(time=records.now(), event=kind, step=self._step, text=shown(text))
        with contextlib.suppress(RunFailure):  # a full disk ends the run where it matters
            records.append(self._run, [event])
        self._hooks.tell(records.event_message(self._run, event, self._figures()))

    def _figures(self) -> dict[str, Any]:
        """Return the finite numbers among the metrics of the last step."""
        values = vars(self._metrics) if self._metrics else {}
        return {
            key: value
            for key, value in values.items()
            if isinstance(value, int | float) and math.isfinite(value)
        }

    def finish(self) -> None:
        """Wait until the hooks have been told."""
        self._watchdog.finish()
        self._hooks.finish()

    def _stalled(self, seconds: float) -> None:
        text = f"no step for {format_duration(seconds)}"
        log.warning("stalled after step %d: %s", self._step, text)
        self.note("stall", text)

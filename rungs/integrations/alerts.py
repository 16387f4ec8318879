"""The events of a run: written to `events.jsonl` and sent to hooks."""

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence

from rungs.common import shown_text
from rungs.common.errors import RunFailure
from rungs.common.run_log import log
from rungs.integrations.hooks import Hooks
from rungs.run import folder, records
from rungs.run.metrics import StepRecord
from rungs.run.records import Event, EventKind

STALL_SECONDS, STALL_FACTOR = 600.0, 10.0
"""A run has stalled after this time, and this multiple of its longest step, without a step."""
_SECONDS_BETWEEN = 5.0


class Alerts:
    """Records events of a run and sends them to the hooks. It never blocks a step. `last_step` is
    the last one before this start, or -1."""

    def __init__(self, run: folder.RunFolder, hooks: Sequence[str], last_step: int) -> None:
        self._run, self._hooks = run, Hooks(hooks)
        self._step = last_step
        self._metrics: StepRecord | None = None
        self._watchdog = Watchdog(self._stalled)

    def start(self) -> None:
        """Record that training starts or resumes."""
        is_first = self._step < 0
        self.note("start", "started" if is_first else f"resumed after step {self._step:,}")
        self._watchdog.start()

    def step_taken(self, metrics: StepRecord) -> None:
        """Record a step, with an event if it is a loss spike or has a warning about a layer."""
        self._watchdog.step_taken()
        self._step, self._metrics = metrics.global_step, metrics
        if spike := getattr(metrics, "spike", None):
            self.note("spike", "loss spike" + ", step skipped" * (spike == "skipped"))
        if warning := getattr(metrics, "layer_warning", None):
            self.note("warning", warning)

    def note(self, kind: EventKind, text: str) -> None:
        """Record an event and send it to the hooks."""
        event = Event(time=records.now(), event=kind, step=self._step, text=shown_text.shown(text))
        with contextlib.suppress(RunFailure):  # a full disk ends the run elsewhere
            records.append(self._run, [event])
        figures = {
            key: value
            for key, value in (vars(self._metrics) if self._metrics else {}).items()
            if isinstance(value, int | float) and math.isfinite(value)
        }
        place = str(self._run.path.resolve())
        self._hooks.tell({"run": place, **event.model_dump(), "figures": figures})

    def note_end(self, kind: EventKind, text: str) -> None:
        """Record the event that ends the steps: what they still wait for is no stall."""
        self._watchdog.finish()
        self.note(kind, text)

    def finish(self) -> None:
        """Wait until the hooks have received everything."""
        self._watchdog.finish()
        self._hooks.finish()

    def _stalled(self, seconds: float) -> None:
        text = f"no step for {shown_text.format_duration(seconds)}"
        log.warning("stalled after step %d: %s", self._step, text)
        self.note("stall", text)


class Watchdog:
    """Calls `stalled` once per stall of at least `seconds`, with the stall's seconds so far."""

    def __init__(self, stalled: Callable[[float], None], seconds: float = STALL_SECONDS) -> None:
        self._stalled, self._seconds = stalled, seconds
        self._last, self._longest = time.monotonic(), 0.0
        self._is_told = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._last = time.monotonic()
        self._thread.start()

    def step_taken(self) -> None:
        now = time.monotonic()
        self._longest = max(self._longest, now - self._last)
        self._last, self._is_told = now, False

    def finish(self) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(min(_SECONDS_BETWEEN, self._seconds / 4)):
            waited = time.monotonic() - self._last
            if not self._is_told and waited > max(self._seconds, STALL_FACTOR * self._longest):
                self._is_told = True
                self._stalled(waited)

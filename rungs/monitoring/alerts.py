"""The events of a run: written to `events.jsonl` and sent to hooks, the commands and webhooks of
`train.py RUN --on-event COMMAND_OR_URL`. For safety hooks come from the command line only, never
from a run folder."""

import contextlib
import json
import math
import queue
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rungs.common import helper_process, shown_text
from rungs.common.errors import RunFailure, UserError, errors_at, reason
from rungs.common.run_log import log
from rungs.run import folder, records
from rungs.run.metrics import StepRecord
from rungs.run.records import Event, EventKind

STALL_SECONDS, STALL_FACTOR = 600.0, 10.0
"""A run has stalled after this time, and this multiple of its longest step, without a step."""
_SECONDS_BETWEEN = 5.0
WEBHOOK = Path(__file__).with_name("webhook.py")
_SECONDS_PER_COMMAND, _SECONDS_PER_TRY = 30.0, 10.0
_DELAYS = (0.0, 2.0, 10.0)
"""Seconds before each attempt to reach a webhook; each may take `_SECONDS_PER_TRY`."""
_SECONDS_AT_END = 60.0
"""How long the end of a run waits for its hooks."""


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
        self._hooks.tell(records.event_message(self._run, event, figures))

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


def check_hooks(hooks: Sequence[str]) -> None:
    """Raise UserError if a hook is neither a URL nor an existing command."""
    for hook in hooks:
        if is_url(hook):
            shown_text.hide(hook.partition("://")[2].partition("/")[2])
            _check_url(hook)
            continue
        with errors_at(f"--on-event {_name(hook)}: ", ValueError):
            words = shlex.split(hook)
        if not words or shutil.which(words[0]) is None:
            raise UserError(
                f"--on-event {_name(hook)}: no such command; give a program with its arguments, or"
                " a URL that begins with https:// or http://"
            )


def _check_url(hook: str) -> None:
    try:
        parts = urllib.parse.urlsplit(hook)
        is_complete = bool(parts.hostname) and parts.port != 0
    except ValueError:  # its message may contain part of a password
        is_complete = False
    if not is_complete:
        raise UserError(
            f"--on-event {hook.partition('://')[0]}://***: no URL with a host and a port from 1 to"
            " 65535; in a password write / as %2F"
        )


def is_url(hook: str) -> bool:
    """Whether a hook is a webhook rather than a command."""
    return hook.startswith(("https://", "http://"))


def _name(hook: str) -> str:
    """Return a hook's name for messages: its program, or its scheme and host. Arguments and paths
    may be secret, as in Slack's webhooks."""
    scheme, separator, rest = hook.partition("://")
    if separator:
        return f"{scheme}://{rest.split('/')[0].rpartition('@')[2]}"
    return hook.split(maxsplit=1)[0] if hook.strip() else "''"


class Hooks:
    """Sends events to each hook, in order and in the background: as JSON on a command's stdin, or
    as the body of a POST request. A failure causes only a warning."""

    def __init__(self, hooks: Sequence[str]) -> None:
        self._events = {hook: queue.SimpleQueue[str | None]() for hook in hooks}
        # Daemon threads, so that a hanging hook can't keep a finished process alive
        self._workers = [
            threading.Thread(target=_work, args=hook, name="hook", daemon=True)
            for hook in self._events.items()
        ]
        for worker in self._workers:
            worker.start()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Queue an event for all hooks; return at once."""
        for untold in self._events.values():
            untold.put(json.dumps(message))

    def finish(self) -> None:
        """Wait for the hooks, up to a limit."""
        deadline = time.monotonic() + _SECONDS_AT_END
        for untold in self._events.values():
            untold.put(None)
        for worker in self._workers:
            worker.join(max(deadline - time.monotonic(), 0))
        if late := sum(worker.is_alive() for worker in self._workers):
            log.warning("--on-event: %d hooks have not ended and are left alone", late)


def _work(hook: str, untold: "queue.SimpleQueue[str | None]") -> None:
    while (text := untold.get()) is not None:
        try:
            if is_url(hook):
                _post(hook, text)
            elif (ended := _run(shlex.split(hook), text, _SECONDS_PER_COMMAND)).returncode:
                raise OSError(f"exit code {ended.returncode}")
        except Exception as error:  # of any program or server
            log.warning("--on-event %s: %s", _name(hook), reason(error))


def _post(url: str, text: str) -> None:
    problem = ""
    for delay in _DELAYS:
        time.sleep(delay)
        with contextlib.suppress(TimeoutError):
            command, body = [sys.executable, "-I", str(WEBHOOK)], f"{url}\n{text}"
            ended = _run(command, body, _SECONDS_PER_TRY, subprocess.PIPE)
            if ended.returncode == 0:
                return
            problem = ended.stderr
    raise OSError(problem or f"took longer than {_SECONDS_PER_TRY:g} s")


def _run(
    command: Sequence[str], text: str, seconds: float, stderr: int = subprocess.DEVNULL
) -> "subprocess.CompletedProcess[str]":
    """Run a command with a text on stdin; if it takes longer, kill it and all that it started, and
    raise TimeoutError. stdout, which may be endless, is discarded. The command gets its own
    session: `kill 0`, with which scripts end what they started, and Ctrl-C stay apart."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        encoding="utf-8",
        errors="replace",
        **helper_process.OWN_SESSION,
    )
    try:
        _, problem = process.communicate(text + "\n", seconds)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"took longer than {seconds:g} s") from None
    finally:
        if process.poll() is None:
            helper_process.kill_session(process)
    return subprocess.CompletedProcess(command, process.returncode, stderr=problem)

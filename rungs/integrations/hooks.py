"""Hooks: the commands and webhooks of `train.py RUN --on-event COMMAND_OR_URL`, which are told the
events of a run. For safety they come from the command line only, never from a run folder."""

import json
import queue
import shlex
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rungs.common import helper_process
from rungs.common.errors import UserError, reason
from rungs.common.run_log import log

WEBHOOK = Path(__file__).with_name("webhook.py")
_SECONDS_PER_COMMAND, _SECONDS_PER_TRY = 30.0, 10.0
_DELAYS = (0.0, 2.0, 10.0)
"""Seconds before each attempt to reach a webhook; each may take `_SECONDS_PER_TRY`."""
_SECONDS_AT_END = 60.0
"""How long the end of a run waits for its hooks."""


def check_hooks(hooks: Sequence[str]) -> None:
    """Raise UserError if a hook is neither a URL nor an existing command."""
    for hook in hooks:
        if is_url(hook):
            _check_url(hook)
            continue
        try:
            words = shlex.split(hook)
        except ValueError:
            words = []
        if not words or shutil.which(words[0]) is None:  # not shown: it may be a secret
            raise UserError(
                "--on-event: no such command; give a program with its arguments, or a URL that"
                " begins with https:// or http://"
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
    return hook.lower().startswith(("https://", "http://"))


def _name(hook: str) -> str:
    """Return the program of a hook, or its scheme and host. Arguments and paths may be secret, as
    in Slack's webhooks."""
    if not is_url(hook):
        return shlex.split(hook)[0]
    parts = urllib.parse.urlsplit(hook)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


class Hooks:
    """Sends events to each hook, in order and in the background. A failure causes only a
    warning."""

    def __init__(self, hooks: Sequence[str]) -> None:
        self._hooks = [_Hook(hook) for hook in hooks]

    def tell(self, message: Mapping[str, Any]) -> None:
        """Queue an event for all hooks; return at once."""
        for hook in self._hooks:
            hook.tell(json.dumps(message))

    def finish(self) -> None:
        """Wait for the hooks, up to a limit, then end those that still run."""
        deadline = time.monotonic() + _SECONDS_AT_END
        for hook in self._hooks:
            hook.tell(None)
        for hook in self._hooks:
            hook.finish(deadline)


class _Hook:
    """Sends events to one hook: as JSON on a command's stdin, or as the body of a POST request."""

    def __init__(self, hook: str) -> None:
        self._hook = hook
        self._untold: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock, self._is_over = threading.Lock(), False
        self._process: subprocess.Popen[str] | None = None
        # A daemon, so that a hanging hook can't keep a finished process alive
        self._worker = threading.Thread(target=self._work, name="hook", daemon=True)
        self._worker.start()

    def tell(self, text: str | None) -> None:
        """Queue an event, or None as the last one."""
        self._untold.put(text)

    def finish(self, deadline: float) -> None:
        """Wait until everything is told; at the deadline, in `time.monotonic()`, end the hook."""
        self._worker.join(max(deadline - time.monotonic(), 0))
        if not self._worker.is_alive():
            return
        log.warning(
            "--on-event %s: ended before it was told everything, %g s after the run",
            *(_name(self._hook), _SECONDS_AT_END),
        )
        with self._lock:
            self._is_over = True
        if self._process is not None and self._process.poll() is None:
            helper_process.kill_session(self._process)

    def _work(self) -> None:
        while (text := self._untold.get()) is not None and not self._is_over:
            try:
                if is_url(self._hook):
                    self._post(text)
                elif code := self._run(shlex.split(self._hook), text, _SECONDS_PER_COMMAND)[0]:
                    raise OSError(f"exit code {code}")
            except Exception as error:  # of any program or server
                if not self._is_over:
                    log.warning("--on-event %s: %s", _name(self._hook), reason(error))

    def _post(self, text: str) -> None:
        problem = f"took longer than {_SECONDS_PER_TRY:g} s"
        for delay in _DELAYS:
            time.sleep(delay)
            command, body = [sys.executable, "-I", str(WEBHOOK)], f"{self._hook}\n{text}"
            try:
                code, problem = self._run(command, body, _SECONDS_PER_TRY, subprocess.PIPE)
            except TimeoutError:
                continue
            if code == 0:
                return
        raise OSError(problem or "its sender failed")

    def _run(
        self, command: Sequence[str], text: str, seconds: float, stderr: int = subprocess.DEVNULL
    ) -> tuple[int, str]:
        """Run a command with a text on stdin, and return its exit code and what it wrote to stderr,
        if that is a pipe. If it takes longer, kill it and all that it started, and raise
        TimeoutError. stdout, which may be endless, is discarded. The command gets its own session:
        `kill 0`, with which scripts end what they started, and Ctrl-C stay apart."""
        with self._lock:
            if self._is_over:
                raise TimeoutError("the run has ended")
            process = self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        try:
            _, problem = process.communicate(text + "\n", seconds)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"took longer than {seconds:g} s") from None
        finally:
            if process.poll() is None:
                helper_process.kill_session(process)
        return process.returncode, problem or ""

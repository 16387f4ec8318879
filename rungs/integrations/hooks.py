"""Hooks: the commands and webhooks of `train.py RUN --on-event COMMAND_OR_URL`, which are told the
events of a run. For safety they come from the command line only, never from a run folder."""

import base64
import json
import queue
import shlex
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

from rungs.common import helper_process
from rungs.common.errors import UserError, reason
from rungs.common.run_log import log

_SECONDS_PER_COMMAND, _SECONDS_PER_TRY = 30.0, 10.0
_DELAYS = (0.0, 2.0, 10.0)
"""Seconds before each attempt to reach a webhook."""
_SECONDS_AT_END = 60.0
"""How long the end of a run waits for its hooks."""


def check_hooks(hooks: Sequence[str]) -> None:
    """Raise UserError if a hook is neither a URL nor an existing command. A hook is not shown, as
    it may be a secret."""
    for hook in hooks:
        try:
            if is_url(hook):
                parts = urllib.parse.urlsplit(hook)
                if parts.hostname and parts.port != 0:
                    continue
            elif (words := shlex.split(hook)) and shutil.which(words[0]):
                continue
        except ValueError:  # a quote that doesn't end, or a port that is no number
            pass
        raise UserError(
            "--on-event: no such command, or no URL with a host and a port; give a program with"
            " its arguments, or a URL that begins with https:// or http:// (in a password write"
            " / as %2F)"
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
            hook.untold.put(json.dumps(message))

    def finish(self) -> None:
        """Wait for the hooks, up to a limit, then end those that still run."""
        deadline = time.monotonic() + _SECONDS_AT_END
        for hook in self._hooks:
            hook.untold.put(None)
        for hook in self._hooks:
            hook.finish(deadline)


class _Hook:
    """Sends events to one hook: as JSON on a command's stdin, or as the body of a POST request."""

    def __init__(self, hook: str) -> None:
        self._hook, self._is_over = hook, False
        self.untold: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        """Events as JSON; None after the last."""
        self._process: subprocess.Popen[str] | None = None
        # A daemon, so that a hanging hook can't keep a finished process alive
        self._worker = threading.Thread(target=self._work, name="hook", daemon=True)
        self._worker.start()

    def finish(self, deadline: float) -> None:
        """Wait until everything is told; at the deadline, in `time.monotonic()`, end the hook."""
        self._worker.join(max(deadline - time.monotonic(), 0))
        if not self._worker.is_alive():
            return
        log.warning(
            "--on-event %s: ended before it was told everything, %g s after the run",
            *(_name(self._hook), _SECONDS_AT_END),
        )
        self._is_over = True
        if self._process is not None and self._process.poll() is None:
            helper_process.kill_session(self._process)

    def _work(self) -> None:
        while (text := self.untold.get()) is not None and not self._is_over:
            try:
                if is_url(self._hook):
                    _post(self._hook, text)
                else:
                    self._run(text)
            except Exception as error:  # of any program or server
                if not self._is_over:
                    log.warning("--on-event %s: %s", _name(self._hook), reason(error))

    def _run(self, text: str) -> None:
        """Run the command with a text on stdin; its output is discarded. If it takes too long, kill
        it and all that it started. It gets its own session: `kill 0`, with which scripts end what
        they started, and Ctrl-C stay apart. Raises OSError for an exit code, TimeoutError."""
        process = self._process = subprocess.Popen(
            shlex.split(self._hook),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
            start_new_session=True,
        )
        try:
            process.communicate(text + "\n", _SECONDS_PER_COMMAND)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"took longer than {_SECONDS_PER_COMMAND:g} s") from None
        finally:
            if process.poll() is None:
                helper_process.kill_session(process)
        if process.returncode:
            raise OSError(f"exit code {process.returncode}")


def _post(url: str, text: str) -> None:
    """Send a text to a webhook, with a user and password in its URL as a header. Raises what the
    last attempt raised."""
    parts = urllib.parse.urlsplit(url)
    user, _, host = parts.netloc.rpartition("@")
    headers = {"Content-Type": "application/json"}
    if user:
        token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
        headers["Authorization"] = f"Basic {token}"
    address = parts._replace(netloc=host).geturl()
    request = urllib.request.Request(address, text.encode(), headers)
    for delay in _DELAYS:
        time.sleep(delay)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS_PER_TRY):
                return
        except Exception as error:  # of any server
            problem = error
    raise problem

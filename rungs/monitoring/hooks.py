"""Commands and webhooks that are told of events: `train.py RUN --on-event COMMAND_OR_URL`.

They come from the command line only, never from a run folder: a run that you were given starts
nothing.
"""

import json
import logging
import shlex
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from rungs.common.errors import UserError, reason

_SECONDS_PER_TRY = 30.0
_DELAYS = (0.0, 2.0, 10.0)
"""Seconds before each try to reach a webhook."""
_SECONDS_AT_END = 60.0
"""How long the end of a run waits for its hooks."""

log = logging.getLogger("rungs")


def check_hooks(hooks: Sequence[str]) -> None:
    """Raise UserError if a hook is no URL and no command that exists."""
    for hook in hooks:
        if is_url(hook):
            continue
        try:
            words = shlex.split(hook)
        except ValueError as error:
            raise UserError(f"--on-event {hook}: {error}") from None
        if not words or shutil.which(words[0]) is None:
            raise UserError(
                f"--on-event {hook}: no such command; give a program with its arguments, or a URL"
                " that begins with https:// or http://"
            )


def is_url(hook: str) -> bool:
    """Whether a hook is a webhook rather than a command."""
    return hook.startswith(("https://", "http://"))


class Hooks:
    """Tells each hook of events, in order and in the background. One that fails costs a warning.

    Args:
        hooks: commands, which get the event as JSON on stdin, and URLs, which get it as the body of
            a POST request.
    """

    def __init__(self, hooks: Sequence[str]) -> None:
        self._workers = {hook: ThreadPoolExecutor(1, "hook") for hook in hooks}
        self._running: set[Any] = set()

    def tell(self, message: Mapping[str, Any]) -> None:
        """Tell all hooks of an event; return at once."""
        text = json.dumps(message)
        for hook, worker in self._workers.items():
            self._running.add(worker.submit(_tell, hook, text))

    def finish(self) -> None:
        """Wait for the hooks, but not for ever."""
        _, late = wait(self._running, _SECONDS_AT_END)
        if late:
            log.warning("--on-event: %d calls have not ended and are left alone", len(late))
        for worker in self._workers.values():
            worker.shutdown(wait=False, cancel_futures=True)


def _tell(hook: str, text: str) -> None:
    try:
        if is_url(hook):
            _post(hook, text)
        else:
            subprocess.run(
                shlex.split(hook),
                input=text + "\n",
                text=True,
                check=True,
                timeout=_SECONDS_PER_TRY,
                capture_output=True,
            )
    except Exception as error:  # of any program or server
        log.warning("--on-event %s: %s", hook, reason(error))


def _post(url: str, text: str) -> None:
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, text.encode(), headers)
    for delay in _DELAYS:
        time.sleep(delay)
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS_PER_TRY):
                return
        except urllib.error.URLError:
            if delay == _DELAYS[-1]:
                raise

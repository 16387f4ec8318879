"""The thread that keeps the mirror of a run up to date while training continues."""

import logging
import threading
import time
from typing import Self

from rungs.common.errors import RunFailure, UserError, reason
from rungs.common.paths import is_file
from rungs.mirror.copier import Copier
from rungs.mirror.mirror_folder import RECORD_FILE, MirrorFolder
from rungs.run.folder import RunFolder

log = logging.getLogger("rungs")

_FIRST_DELAY, _LONGEST_DELAY = 10.0, 600.0
"""Seconds until a copy that failed is tried again; twice as long each time."""
_TRIES_AT_END = 3
_SECONDS_AT_END = 1800.0
"""How long the end of a run waits while nothing arrives at the mirror, as far as that is known."""


class Mirroring:
    """Copies a run to its mirror in the background while the `with` block runs. An unreachable
    mirror costs warnings, never a step. If copies take longer than the steps between checkpoints,
    the newest checkpoint is copied next.

    Args:
        run: the run folder, whose lock is held.
        url: of the mirror.
        keep: the key `keep_checkpoints` of the run.
    """

    def __init__(self, run: RunFolder, url: str, keep: int) -> None:
        self._url, self._copier = url, Copier(run, MirrorFolder(url), keep)
        self._is_due, self._is_ending = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="mirror", daemon=True)

    def request(self) -> None:
        """Have what is new copied soon; return at once."""
        self._is_due.set()

    def __enter__(self) -> Self:
        self._is_due.set()  # the warning of a mirror that can't be written to comes at once
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Wait until everything is copied, unless it can't be."""
        self._is_ending.set()
        self._is_due.set()
        self._thread.join(1.0)
        if self._thread.is_alive():
            log.info("copying the rest to %s; Ctrl-C leaves without it", self._url)
        ended_at = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(1.0)
            moved_at = self._copier.mirror.progress.moved_at
            if time.monotonic() - max(moved_at, ended_at) > _SECONDS_AT_END:
                log.warning("%s: no upload gets through; ended without the rest", self._url)
                return

    def _work(self) -> None:
        failures = 0
        while self._is_due.wait():
            self._is_due.clear()
            is_last = self._is_ending.is_set()
            try:
                self._copier.copy(everything=is_last)
            except (UserError, RunFailure) as error:
                log.warning("%s; nothing more is copied there", error)
                return
            except Exception as error:  # of any library behind fsspec
                failures += 1
                if is_last and failures >= _TRIES_AT_END:
                    log.warning("%s: %s; the mirror is not complete", self._url, reason(error))
                    return
                self._wait_to_try_again(failures, error)
            else:
                if failures:
                    log.info("%s: reached again; up to date", self._url)
                failures = 0
                if is_last:
                    return

    def _wait_to_try_again(self, failures: int, error: Exception) -> None:
        delay = min(_FIRST_DELAY * 2 ** (failures - 1), _LONGEST_DELAY)
        log.warning("%s: %s; trying again in %.0f s", self._url, reason(error), delay)
        if self._is_ending.is_set():
            time.sleep(delay)
        else:
            self._is_ending.wait(delay)
        self._is_due.set()


class NoMirroring:
    """For a run without a mirror, and for all processes but the first, which copies for all."""

    def request(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


def has_mirror(run: RunFolder) -> bool:
    """Whether a run was ever copied to a mirror."""
    return is_file(run.path / RECORD_FILE)

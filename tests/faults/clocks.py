"""A clock that is wrong."""

import datetime
import time

import kills

import checkpointing
import resume


def set_back(seconds: str, *kill: str) -> None:
    """Have the process believe that it is earlier, and be killed as by `kills.kill_at`."""
    back = float(seconds)
    now = time.time

    def earlier() -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=back)

    checkpointing.utc_now = resume.utc_now = earlier
    time.time = lambda: now() - back
    kills.kill_at(*kill)

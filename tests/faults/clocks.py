"""A clock that is wrong."""

import datetime
import time

from rungs.checkpointing import checkpoint_folder
from rungs.training import resume
from tests.faults import kills


def set_back(seconds: str, *kill: str) -> None:
    """Have the process believe that it is earlier, and be killed as by `kills.kill_at`."""
    back = float(seconds)
    now = time.time

    def earlier() -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=back)

    checkpoint_folder.utc_now = resume.utc_now = earlier
    time.time = lambda: now() - back
    kills.kill_at(*kill)

"""Less memory than a step needs."""

import re
import resource
from pathlib import Path
from typing import Any

from rungs.planning import oom_advice
from rungs.training import trainer

MACHINE_BYTES = 900_000_000


def too_little_for_a_step(megabytes: str) -> None:
    """From the first step on, this process gets so much more memory than it has. XLA reports a
    buffer that it cannot get; its compiler, which needs some room of its own, would abort."""
    make_step = trainer.make_train_step

    def made(*args: Any) -> Any:
        train_step = make_step(*args)

        def limited(*args: Any) -> Any:
            status = Path("/proc/self/status").read_text()
            has = 1024 * int(re.findall(r"VmSize:\s+(\d+)", status)[0])
            limit = has + int(megabytes) * 1_000_000
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            return train_step(*args)

        return limited

    vars(trainer)["make_train_step"] = made
    vars(oom_advice)["memory_bytes"] = lambda: MACHINE_BYTES

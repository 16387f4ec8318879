"""`train.py` that records the batch of every step: `recording_train.py FILE RUN …`.

FILE gets a line for the platform, then one for each step as it is taken: its number by the
optimizer's own count, and a checksum of the very arrays that the step is given. `Account`
in `rungs/diagnostics/resume_check/compare.py` reads them.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from rungs.training import trainer


def watch_steps(path: Path) -> None:
    """Have every step that a trainer takes written down."""
    make_train_step = trainer.make_train_step

    def make_watched_step(*args: Any) -> Callable[..., Any]:
        train_step = make_train_step(*args)
        file = path.open("w")
        _write(file, jax.default_backend())

        def watched_step(
            model: Any, optimizer: Any, inputs: jax.Array, targets: jax.Array, *limit: jax.Array
        ) -> Any:
            step = int(jax.device_get(optimizer.step.get_value()))
            _write(file, (step, _checksum((inputs, targets))))
            return train_step(model, optimizer, inputs, targets, *limit)

        return watched_step

    trainer.make_train_step = make_watched_step  # type: ignore[assignment]


def _checksum(batch: tuple[jax.Array, ...]) -> str:
    digest = hashlib.sha256()
    for array in jax.device_get(batch):
        digest.update(f"{array.dtype} {array.shape} ".encode() + np.asarray(array).tobytes())
    return digest.hexdigest()


def _write(file: TextIO, what: Any) -> None:
    file.write(json.dumps(what) + "\n")
    file.flush()


if __name__ == "__main__":
    import train
    from rungs.common.errors import run_command

    watch_steps(Path(sys.argv.pop(1)))
    run_command(train.main)

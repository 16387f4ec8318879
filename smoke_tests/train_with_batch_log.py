"""Run `train.py` and log the batch of every step: `train_with_batch_log.py FILE RUN …`.

FILE gets a line with the platform, then one for each step: its number, as the optimizer counts it,
and a checksum of the arrays that the train step was given. `BatchLog` in
`rungs/diagnostics/resume_check/check.py` reads the file.
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


def log_batches(path: Path) -> None:
    """Make every train step that a trainer creates log its batches to a file."""
    make_train_step = trainer.make_train_step

    def make_logged_step(*args: Any) -> Callable[..., Any]:
        train_step = make_train_step(*args)
        file = path.open("w")
        _write(file, jax.default_backend())

        def logged_step(
            model: Any, optimizer: Any, inputs: jax.Array, targets: jax.Array, *limit: jax.Array
        ) -> Any:
            step = int(jax.device_get(optimizer.step.get_value()))
            _write(file, (step, _checksum((inputs, targets))))
            return train_step(model, optimizer, inputs, targets, *limit)

        return logged_step

    trainer.make_train_step = make_logged_step  # type: ignore[assignment]


def _checksum(batch: tuple[jax.Array, ...]) -> str:
    digest = hashlib.sha256()
    for array in jax.device_get(batch):
        digest.update(f"{array.dtype} {array.shape} ".encode() + np.asarray(array).tobytes())
    return digest.hexdigest()


def _write(file: TextIO, value: Any) -> None:
    file.write(json.dumps(value) + "\n")
    file.flush()


if __name__ == "__main__":
    from rungs.common.command import run_command

    import train

    log_batches(Path(sys.argv.pop(1)))
    run_command(train.main)

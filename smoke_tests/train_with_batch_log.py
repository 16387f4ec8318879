"""Run `train.py` or `reinforce.py` and log the batch of every update:
`train_with_batch_log.py FILE RUN …`.

FILE gets a line with the platform, then one for each update: its number, as the optimizer counts
it, and a checksum of the arrays that it was given. `BatchLog` in
`rungs/checks/resume.py` reads the file.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np

from rungs.config.run_config import REINFORCE_FILE, config_files
from rungs.reinforcement import policy_update
from rungs.run.folder import find_run
from rungs.training import dataset_learner


def log_batches(path: Path, module: Any) -> None:
    """Let every step that a module makes with `make_step` log its batches to a file."""
    make_step, file = module.make_step, path.open("w", encoding="utf-8")

    def make_logged_step(*args: Any, **keys: Any) -> Callable[..., Any]:
        step = make_step(*args, **keys)
        if not file.tell():
            _write(file, jax.default_backend())

        def logged_step(
            model: Any,
            optimizer: Any,
            inputs: jax.Array,
            targets: jax.Array,
            *others: jax.Array,
            **limit: jax.Array,
        ) -> Any:
            number = int(jax.device_get(optimizer.step.get_value()))
            _write(file, (number, _checksum((inputs, targets))))
            return step(model, optimizer, inputs, targets, *others, **limit)

        return logged_step

    module.make_step = make_logged_step


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

    from rungs.cli import reinforce, train

    batch_log = Path(sys.argv.pop(1))
    if config_files(find_run(sys.argv[1]))[1] == REINFORCE_FILE:
        log_batches(batch_log, policy_update)
        run_command(reinforce.main)
    else:
        log_batches(batch_log, dataset_learner)
        run_command(train.main)

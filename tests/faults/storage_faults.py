"""Faults of storage, put into a process that trains: see `faulty_train.py`."""

import errno
import os
import resource
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from rungs.checkpointing import weights_file
from rungs.run import metrics


def limit_files(size: str) -> None:
    """No file grows beyond so many bytes: the system's own EFBIG."""
    jax.config.update("jax_compilation_cache_dir", None)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def before_call(owner: Any, name: str, count: int, do: Callable[..., object]) -> None:
    """Do something first in the `count`-th call of a function, with its arguments."""
    original, calls = getattr(owner, name), 0

    def counted(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            do(*arguments)
        return original(*arguments, **named)

    setattr(owner, name, counted)


def fill_up_in_weights(count: str) -> None:
    """The disk is full when half of a checkpoint's weights are written."""

    def write_half(folder: Path, *_: Any) -> None:
        (folder / "model.safetensors").write_bytes(bytes(50_000))
        fail(errno.ENOSPC)

    before_call(weights_file, "write_weights", int(count), write_half)


def remove_at_step(step: str, folder: str) -> None:
    """A folder is removed when a step is about to be recorded, and the first checkpoint stands."""

    def remove(*_: Any) -> None:
        checkpoints = Path(folder, "checkpoints")
        while checkpoints.exists() and not os.path.lexists(checkpoints / "latest"):
            time.sleep(0.01)
        while Path(folder).exists():  # what is written meanwhile would stay
            shutil.rmtree(folder, ignore_errors=True)

    before_call(metrics.MetricsLog, "append", int(step) + 1, remove)


def cut_at_step(step: str, file: str, size: str) -> None:
    """A file is cut when a step is about to be recorded."""
    before_call(
        metrics.MetricsLog, "append", int(step) + 1, lambda *_: os.truncate(file, int(size))
    )

"""`train.py`, killed by SIGKILL at a moment of its own: `killed_train.py MOMENT COUNT RUN …`.

The moment is the COUNT-th call of one of the product's functions (0: any call at which the
moment's own condition holds), met before, within or after.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoint
import checkpointing
import metrics
import trainer
import weights_file


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wrap(owner: Any, name: str, before: Callable[..., None], count: int) -> None:
    """Call `before` with the arguments of the `count`-th call of a function, 0 for every call."""
    original = getattr(owner, name)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if count in (0, calls):
            before(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, counted)


def tear_weights(folder: Path, *_: Any) -> None:
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"\x40" * 100)
    die()


def tear_metrics_line(log: Any, step: Any) -> None:
    log._file.write(step.as_line()[:20].encode())
    die()


def seal_then_die(*args: Any) -> None:
    original_seal(*args)
    die()


def die_at_the_last_step(folder: Path) -> None:
    latest = checkpointing.list_checkpoints(folder)[-1:]
    if any(saved.step + 1 == saved.meta.total_steps for saved in latest):
        die()


def delete_half_then_die(path: Path) -> None:
    next(Path(path).glob("model*.safetensors")).unlink()
    die()


original_seal = checkpoint.seal
AT_THE_END = "between the last rename and its links"
MOMENTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "before a step is recorded": (metrics.MetricsLog, "append", lambda *_: die()),
    "within a metrics line": (metrics.MetricsLog, "append", tear_metrics_line),
    "in validation": (trainer, "mean_loss", lambda *_: die()),
    "before the weights are written": (weights_file, "write_weights", lambda *_: die()),
    "within the weights": (weights_file, "write_weights", tear_weights),
    "between the shards and their index": (weights_file, "write_index", lambda *_: die()),
    "before meta.json": (checkpoint, "seal", lambda *_: die()),
    "between write and rename": (checkpoint, "seal", seal_then_die),
    "between rename and links": (checkpointing, "relink", lambda *_: die()),
    "while links change": (checkpointing, "_point", lambda *_: die()),
    AT_THE_END: (checkpointing, "relink", die_at_the_last_step),
    "while pruning": (checkpointing.shutil, "rmtree", delete_half_then_die),
}


if __name__ == "__main__":
    moment, count, *arguments = sys.argv[1:]
    owner, name, before = MOMENTS[moment]
    wrap(owner, name, before, int(count))
    sys.argv = ["train.py", *arguments]
    import train
    from errors import run_command

    run_command(train.main)

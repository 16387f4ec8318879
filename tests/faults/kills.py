"""A signal to the training process itself, at a moment of its own: SIGKILL as a fault like any
other, SIGTERM and SIGINT once or twice.

A moment is the COUNT-th call of one of the product's functions (0: any call at which the moment's
own condition holds), met before, within or after.
"""

import os
import pathlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from rungs.checkpointing import (
    checkpoint_folder,
    links,
    manifest,
    restore,
    retention,
    saver,
    weights_file,
)
from rungs.common import run_log
from rungs.run import metrics
from rungs.step import eval_step, train_step
from rungs.training import start, trainer
from rungs.training.chart_process import ChartDrawer

SECONDS_TO_A_SECOND_SIGNAL = 1.2


class Moment(NamedTuple):
    """Where a signal falls."""

    owner: Any
    function: str
    tear: Callable[..., None] = lambda *_: None
    """What a kill leaves half-done, with the function's arguments."""
    is_after: bool = False
    condition: Callable[..., bool] = lambda *_: True


def half_the_weights(folder: Path, *_: Any) -> None:
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"\x40" * 100)


def half_a_line(log: Any, step: Any) -> None:
    log._file.write(step.as_line()[:20].encode())


def half_deleted(path: Path) -> None:
    next(Path(path).glob("model*.safetensors")).unlink()


def half_a_chart(drawer: Any) -> None:
    folder = Path(drawer._command[-1])
    (folder / ".loss-chart.12345.png").write_bytes(b"\x89PNG\r\n\x1a\n")


def half_the_holder(path: Path, *_: Any) -> None:
    path.touch()


def is_the_last_step(folder: Path) -> bool:
    latest = checkpoint_folder.list_checkpoints(folder)[-1:]
    return any(saved.step + 1 == saved.meta.total_steps for saved in latest)


def is_holder(path: Path, *_: Any) -> bool:
    return path.name == "holder.lock"


AT_THE_START = {
    "before the lock": Moment(filelock.FileLock, "acquire"),
    "while the lock is taken": Moment(filelock.FileLock, "acquire", is_after=True),
    "while the holder is written": Moment(
        pathlib.Path, "write_text", half_the_holder, condition=is_holder
    ),
    "before train.log is opened": Moment(run_log, "keep"),
    "while train.log is opened": Moment(run_log, "keep", is_after=True),
    "while the checkpoint is restored": Moment(restore, "place_weights", is_after=True),
    "before the metrics are cut": Moment(metrics, "_replace"),
    "while the metrics are cut": Moment(metrics, "_replace", is_after=True),
    "before the first step": Moment(start, "_train"),
}
"""Each of them comes once in a start that goes on."""
IN_THE_LOOP = {
    "while the step is compiled": Moment(train_step, "gradients"),
    "before a step is recorded": Moment(metrics.MetricsLog, "append", half_a_line),
    "after a step is recorded": Moment(metrics.MetricsLog, "append", is_after=True),
    "before a validation": Moment(trainer, "mean_loss"),
    "in a validation": Moment(eval_step, "place_batch"),
    "after a validation": Moment(trainer, "mean_loss", is_after=True),
    "before the metrics are flushed": Moment(metrics.MetricsLog, "sync"),
    "after the metrics are flushed": Moment(metrics.MetricsLog, "sync", is_after=True),
    "before the weights are written": Moment(weights_file, "write_weights", half_the_weights),
    "between the shards and their index": Moment(weights_file, "write_index"),
    "before meta.json": Moment(manifest, "write_manifest"),
    "between write and rename": Moment(manifest, "write_manifest", is_after=True),
    "between rename and links": Moment(links, "update_links"),
    "while links change": Moment(links, "_point"),
    "while pruning": Moment(retention.shutil, "rmtree", half_deleted),
    "while charts are drawn": Moment(ChartDrawer, "request", half_a_chart),
}
AT_THE_END = {
    "between the last rename and its links": Moment(
        links, "update_links", condition=is_the_last_step
    )
}
MAKING_UP = {"between a late validation and its save": Moment(saver.Saver, "save")}
OF_ANY_PROCESS = {"in the optimizer's part": Moment(saver, "named_arrays")}
WHILE_MOVING = {"between two moves": Moment(pathlib.Path, "rename")}
MOMENTS = AT_THE_START | IN_THE_LOOP | AT_THE_END | MAKING_UP | OF_ANY_PROCESS | WHILE_MOVING


def kill_at(name: str, count: str) -> None:
    """Be killed at a moment, with what it leaves half-done."""
    moment = MOMENTS[name]

    def die(*args: Any) -> None:
        moment.tear(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    _call(die, moment, int(count))


def signal_at(name: str, count: str, *signals: str) -> None:
    """Get signals at a moment, each longer after the one before than counts as one wish."""

    def signal_oneself(*_: Any) -> None:
        for number, wanted in enumerate(signals):
            time.sleep(SECONDS_TO_A_SECOND_SIGNAL if number else 0)
            os.kill(os.getpid(), signal.Signals[wanted])

    _call(signal_oneself, MOMENTS[name], int(count))


def _call(act: Callable[..., None], moment: Moment, count: int) -> None:
    """Call `act` at the `count`-th call, with its arguments. Charts are drawn only where they are
    what it is about: that takes more time than all the rest."""
    if moment.owner is not ChartDrawer:
        ChartDrawer._begin = lambda _: None  # type: ignore[method-assign, assignment]
    original = getattr(moment.owner, moment.function)
    calls = 0

    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        is_one = moment.condition(*args)
        calls += is_one
        is_now = is_one and count in (0, calls)
        if is_now and not moment.is_after:
            act(*args)
        result = original(*args, **kwargs)
        if is_now and moment.is_after:
            act(*args)
        return result

    setattr(moment.owner, moment.function, watched)

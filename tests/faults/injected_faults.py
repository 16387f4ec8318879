"""Faults that `faulty_train.py` puts into a training process before it starts.

A fault is named by its function and the function's arguments, all of them text:
`kill_at:before meta.json:2`. Each replaces functions of Rungs with ones that fail, or that send a
signal to the process itself.
"""

import errno
import fcntl
import os
import re
import resource
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from rungs.checkpointing import checkpoint_folder, load, manifest, saver, weights_file
from rungs.common import disk, run_log
from rungs.data.tokens.loader import Batch, TrainingData
from rungs.parallel import target_device
from rungs.planning import advice
from rungs.run import layer_record
from rungs.run.metrics import MetricsLog
from rungs.step import eval_step, train_step
from rungs.training import dataset_learner, start
from rungs.training.background import ChartProcess
from tests.support import charts

SECONDS_TO_A_SECOND_SIGNAL = 1.2
MACHINE_BYTES = 900_000_000
"""What a machine with too little memory is said to have."""


class Moment(NamedTuple):
    """A call of one of Rungs' functions, at which a signal can arrive."""

    owner: Any
    function: str
    leave: Callable[..., None] = lambda *_: None
    """What a kill leaves half done, with the function's arguments."""
    is_after: bool = False
    condition: Callable[..., bool] = lambda *_: True
    """Which of the calls count."""


def half_of_the_weights(folder: Path, *_: Any) -> None:
    (folder / "model-00001-of-00009.safetensors").write_bytes(b"\x40" * 100)


def half_a_line(log: Any, step: Any) -> None:
    log._file.write(step.as_line()[:20].encode())


def half_a_deletion(path: Path) -> None:
    next(Path(path).glob("model*.safetensors")).unlink()


def half_a_chart(drawer: Any) -> None:
    folder = Path(drawer._process._command[2])
    (folder / ".loss-chart.png.1234abcd.new").write_bytes(b"\x89PNG\r\n\x1a\n")


def an_unfinished_file(path: Path, *_: Any) -> None:
    path.with_name(f".{path.name}.1234abcd.new").touch()


def is_last_step(folder: Path) -> bool:
    latest = checkpoint_folder.list_checkpoints(folder)[-1:]
    return any(saved.step + 1 == saved.meta.total_steps for saved in latest)


def is_metrics(path: Path, *_: Any) -> bool:
    return path.name == "metrics.jsonl"


def is_layers(path: Path, *_: Any) -> bool:
    return path.name == "layers.npy"


AT_THE_START = {
    "before the lock": Moment(fcntl, "flock"),
    "while the lock is taken": Moment(fcntl, "flock", is_after=True),
    "while the holder is written": Moment(socket, "gethostname"),
    "before train.log is opened": Moment(run_log, "log_to_file"),
    "while train.log is opened": Moment(run_log, "log_to_file", is_after=True),
    "while the checkpoint is restored": Moment(load, "place_weights", is_after=True),
    "before the metrics are cut": Moment(
        disk, "replace_file", an_unfinished_file, condition=is_metrics
    ),
    "while the metrics are cut": Moment(disk, "replace_file", is_after=True, condition=is_metrics),
    "before the first step": Moment(start, "make_trainer"),
    "while the step is compiled": Moment(train_step, "summed_gradients"),
}
"""Each happens once in a start that resumes."""
IN_THE_LOOP = {
    "before a step is recorded": Moment(MetricsLog, "append", half_a_line),
    "after a step is recorded": Moment(MetricsLog, "append", is_after=True),
    "before a validation": Moment(dataset_learner, "validation_losses"),
    "in a validation": Moment(eval_step, "place_batch"),
    "after a validation": Moment(dataset_learner, "validation_losses", is_after=True),
    "before the metrics are flushed": Moment(MetricsLog, "sync"),
    "after the metrics are flushed": Moment(MetricsLog, "sync", is_after=True),
    "before the weights are written": Moment(weights_file, "write_weights", half_of_the_weights),
    "between the shards and their index": Moment(weights_file, "write_index"),
    "before meta.json": Moment(manifest, "write_manifest"),
    "between write and rename": Moment(manifest, "write_manifest", is_after=True),
    "between rename and links": Moment(checkpoint_folder, "update_links"),
    "while links change": Moment(checkpoint_folder, "_point"),
    "while pruning": Moment(shutil, "rmtree", half_a_deletion),
    "while charts are drawn": Moment(ChartProcess, "request", half_a_chart),
}
AT_THE_END = {
    "between the last rename and its links": Moment(
        checkpoint_folder, "update_links", condition=is_last_step
    )
}
MOMENTS = {
    **AT_THE_START,
    **IN_THE_LOOP,
    **AT_THE_END,
    "between a late validation and its save": Moment(saver.Saver, "save"),
    "in the optimizer's part": Moment(saver, "named_arrays"),
    "between a row of layers and its header": Moment(layer_record, "_header"),
    "while the layers are cut": Moment(disk, "replace_file", is_after=True, condition=is_layers),
}


# Signals


def kill_at(moment: str, count: str) -> None:
    """Send SIGKILL at the count-th call of a moment, or at any if the count is 0."""

    def kill(*args: Any) -> None:
        MOMENTS[moment].leave(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    _act_at(moment, count, kill)


def signal_at(moment: str, count: str, *names: str) -> None:
    """Send signals at a moment, far enough apart not to count as one."""

    def send(*_: Any) -> None:
        for number, name in enumerate(names):
            time.sleep(SECONDS_TO_A_SECOND_SIGNAL if number else 0)
            os.kill(os.getpid(), signal.Signals[name])

    _act_at(moment, count, send)


def _act_at(name: str, count: str, act: Callable[..., object]) -> None:
    """Act at a moment. Charts, which take more time than all the rest, are drawn only if the moment
    is about them."""
    owner, function, _, is_after, condition = MOMENTS[name]
    if owner is not ChartProcess:
        charts.draw_none()
    act_at_call(owner, function, int(count), act, is_after, condition)


def act_at_call(
    owner: Any,
    function: str,
    count: int,
    act: Callable[..., object],
    is_after: bool = False,
    condition: Callable[..., bool] = lambda *_: True,
) -> None:
    """Do something before or after the count-th call of a function, with the call's arguments.

    Args:
        count: from 1, among the calls for which the condition holds; 0 for each of them.
    """
    original = getattr(owner, function)
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        does_count = condition(*args)
        calls += does_count
        is_now = does_count and count in (0, calls)
        if is_now and not is_after:
            act(*args)
        result = original(*args, **kwargs)
        if is_now and is_after:
            act(*args)
        return result

    setattr(owner, function, counted)


# Storage


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def limit_file_size(size: str) -> None:
    """Let no file grow beyond so many bytes: the system's own EFBIG."""
    jax.config.update("jax_enable_compilation_cache", False)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), resource.RLIM_INFINITY))


def fill_disk_in_weights(count: str) -> None:
    """Fail with a full disk when half of the count-th checkpoint's weights are written."""

    def write_half(folder: Path, *_: Any) -> None:
        (folder / "model.safetensors").write_bytes(bytes(50_000))
        fail(errno.ENOSPC)

    act_at_call(weights_file, "write_weights", int(count), write_half)


def fill_disk_of_log() -> None:
    """Write the log to a full device."""
    run_log._File._open = lambda _: Path("/dev/full").open("w")  # type: ignore[assignment, method-assign]  # noqa: SIM115


def truncate_at_step(step: str, file: str, size: str) -> None:
    """Truncate a file before a step is recorded."""
    act_at_call(MetricsLog, "append", int(step) + 1, lambda *_: os.truncate(file, int(size)))


# Memory


def limit_memory_of_steps(megabytes: str) -> None:
    """Let the process allocate only so much more memory from the first step on. XLA reports a
    buffer that it cannot get; its compiler, which needs some room of its own, would abort."""
    make_step = dataset_learner.make_step

    def make_limited(*args: Any) -> Any:
        train_step = make_step(*args)

        def limited(*args: Any) -> Any:
            status = Path("/proc/self/status").read_text()
            allocated = 1024 * int(re.findall(r"VmSize:\s+(\d+)", status)[0])
            limit = allocated + int(megabytes) * 1_000_000
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            return train_step(*args)

        return limited

    vars(dataset_learner)["make_step"] = make_limited
    vars(advice)["memory_bytes"] = lambda: MACHINE_BYTES


# Mistakes in resuming


def reset_first_moments() -> None:
    """Restore the mean of gradients as 0."""
    _restore_as_zeros("mu")


def _restore_as_zeros(name: str) -> None:
    restore = start.restore

    def restore_but_one(*args: Any) -> Any:
        model, optimizer = restore(*args)
        for path, variable in nnx.to_flat_state(nnx.state(optimizer)):
            if name in path:
                variable.set_value(jnp.zeros_like(variable.get_value()))
        return model, optimizer

    start.restore = restore_but_one  # type: ignore[assignment]


def skip_a_batch() -> None:
    """Resume with the batch of the step after."""
    batches = TrainingData.batches

    def ahead(self: TrainingData, first_step: int = 0, *args: Any) -> Iterator[Batch]:
        yield from batches(self, first_step + 1 if first_step else 0, *args)
        if first_step:
            yield self.batch(self.total_steps - 1, *args)

    TrainingData.batches = ahead  # type: ignore[method-assign, assignment]


def trace_for(platform: str) -> None:
    """Lay arrays out as on another platform."""
    target_device._local_device = lambda: target_device.Target(platform)

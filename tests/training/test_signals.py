"""Signals and a second process: how a run stops, and starts again."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.run import metrics as metrics_module
from rungs.run.folder import RunFolder, StartOptions
from rungs.step import eval_step
from rungs.training.resume import checkpoint_to_resume
from tests.support.starting import go
from tests.support.tiny_run import (
    assert_same_outcome,
    change,
    command,
    last_checkpoint,
    losses,
    make_run,
    train,
)


@pytest.mark.long
def test_a_signal_interrupts_a_validation_and_the_next_start_repeats_it(
    finished: RunFolder, datasets_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    with monkeypatch.context() as patch:
        stop_in_validation(patch, batch=6)  # each has four
        assert go(run, datasets_dir) == 143
    cut_short = last_checkpoint(run)
    assert (cut_short.step, len(losses(run))) == (5, 6)
    assert cut_short.meta.selection_loss is None
    change(run, keep_checkpoints=-1)
    assert go(run, datasets_dir, rewind_to="step-000005") == 0
    assert_same_outcome(run, finished)
    before, after = (c for c in list_checkpoints(run.checkpoints) if c.step == 5)
    assert before.folder == cut_short.folder
    assert after.meta.selection_loss == metrics_module.read(run.metrics)[5].validation_loss
    again = checkpoint_to_resume(run, StartOptions(rewind_to="step-000005"))
    assert again is not None
    assert again.folder == after.folder


def stop_in_validation(patch: pytest.MonkeyPatch, batch: int) -> None:
    """Send SIGTERM when that batch, counted over all validations, is placed on the devices."""
    place_batch = eval_step.place_batch
    numbers = iter(range(1, 1000))

    def place_or_stop(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == batch:
            os.kill(os.getpid(), signal.SIGTERM)
        return place_batch(*args, **kwargs)

    patch.setattr(eval_step, "place_batch", place_or_stop)


@pytest.mark.long
def test_a_second_training_process_is_refused(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", epochs=100)
    first = subprocess.Popen(command(run, datasets_dir), stderr=subprocess.DEVNULL)
    wait_for(lambda: run.metrics.exists())
    second = train(run, datasets_dir)
    first.kill()
    first.wait()
    assert second.returncode == 2
    assert f"in use by process {first.pid} on " in second.stderr
    change(run, epochs=100)
    with run.lock():
        pass  # the lock of a dead process is stale


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

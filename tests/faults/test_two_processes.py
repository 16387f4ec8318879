"""One of a run's two processes is killed or stopped."""

import signal
from pathlib import Path

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.run.folder import RunFolder
from tests.support.tiny_run import (
    assert_same_outcome,
    last_checkpoint,
    losses,
    make_run,
)
from tests.support.two_processes import train_to_end, two_processes

MESH = {"mode": "fsdp_tp", "data": 2, "tensor": 2}
NO_FAULT = ""


@pytest.mark.long
def test_a_killed_or_stopped_process_does_not_change_the_outcome(
    datasets_dir: Path, tmp_path: Path
) -> None:
    names = ("uninterrupted", "run")
    uninterrupted, run = (make_run(tmp_path / name, sharding=MESH) for name in names)
    train_to_end(uninterrupted, datasets_dir)

    kill("between write and rename", 2, 0, run, datasets_dir)
    assert [c.step for c in list_checkpoints(run.checkpoints)] == [0]
    kill("in the optimizer's part", 1, 1, run, datasets_dir)
    saved = last_checkpoint(run).step
    faults = (NO_FAULT, "signal_at:in a validation:2:SIGTERM")
    with two_processes(run, datasets_dir, faults) as both:
        assert both.exit_codes() == [143, 143], both.outputs()
    stopped = last_checkpoint(run)
    assert stopped.damage() == []
    assert saved < stopped.step == len(losses(run)) - 1
    assert (stopped.step % 5, stopped.meta.selection_loss) == (0, None)
    train_to_end(run, datasets_dir)
    assert_same_outcome(run, uninterrupted)


def kill(moment: str, count: int, number: int, run: RunFolder, datasets_dir: Path) -> None:
    """Kill one process at a moment; the other is killed once that one is dead."""
    faults = [NO_FAULT, NO_FAULT]
    faults[number] = f"kill_at:{moment}:{count}"
    with two_processes(run, datasets_dir, tuple(faults)) as both:
        assert both.processes[number].wait(900) == -signal.SIGKILL, both.outputs()

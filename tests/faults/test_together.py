"""Two processes of one run, one of which is killed or told to stop at a moment of its own."""

import signal
from pathlib import Path

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.run.folder import RunFolder
from tests.support.tiny_run import (
    assert_same_outcome,
    last_checkpoint,
    losses,
    make_dataset,
    make_run,
)
from tests.support.together import finish, together

MESH = {"mode": "fsdp_tp", "data": 2, "tensor": 2}
NO_FAULT = ""


@pytest.mark.long
def test_one_of_two_killed_or_stopped_changes_nothing(tmp_path: Path) -> None:
    datasets_dir = tmp_path / "datasets"
    make_dataset(datasets_dir)
    straight, run = (make_run(tmp_path / name, sharding=MESH) for name in ("straight", "run"))
    finish(straight, datasets_dir)

    kill("before the weights are written", 2, 0, run, datasets_dir)
    assert [c.step for c in list_checkpoints(run.checkpoints)] == [0]
    kill("between write and rename", 2, 0, run, datasets_dir)
    kill("in the optimizer's part", 1, 1, run, datasets_dir)
    saved = last_checkpoint(run).step
    faults = (NO_FAULT, "kills.signal_at:in a validation:2:SIGTERM")
    with together(run, datasets_dir, faults) as both:
        assert both.exit_codes() == [143, 143], both.said()
    stopped = last_checkpoint(run)
    assert stopped.damage() == []
    assert saved < stopped.step == len(losses(run)) - 1
    assert (stopped.step % 5, stopped.meta.selection_loss) == (0, None)
    finish(run, datasets_dir)
    assert_same_outcome(run, straight)


def kill(moment: str, count: int, number: int, run: RunFolder, datasets_dir: Path) -> None:
    """Have one process killed; the other is, too, once that has died."""
    faults = [NO_FAULT, NO_FAULT]
    faults[number] = f"kills.kill_at:{moment}:{count}"
    with together(run, datasets_dir, tuple(faults)) as both:
        assert both.processes[number].wait(180) == -signal.SIGKILL, both.said()

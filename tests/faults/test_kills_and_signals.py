"""A run that is killed or stopped again and again ends bit-identical to an uninterrupted run."""

import random
import signal
import subprocess
import time
from itertools import cycle
from pathlib import Path

import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.run.folder import RunFolder
from tests.faults.injected_faults import AT_THE_END, IN_THE_LOOP
from tests.faults.short_runs import train_with_fault
from tests.support.tiny_run import (
    assert_same_outcome,
    command,
    last_checkpoint,
    losses,
    make_run,
    train,
)

RANDOM_KILLS = 2
NEXT_TO_ANOTHER = {
    *("after a step is recorded", "after a validation", "after the metrics are flushed"),
    *("between the shards and their index", "between rename and links"),
}
KILLED_AT_THE_START = [
    "while the holder is written",
    "while the checkpoint is restored",
    "before the metrics are cut",
    "while the metrics are cut",
]
SIGNALLED_AT_THE_START = ["while the holder is written", "while the step is compiled"]
SIGNALLED_IN_THE_LOOP = [
    *("after a step is recorded", "before a validation", "in a validation"),
    *("before the weights are written", "between write and rename", "while charts are drawn"),
]
"""Where a start or a loop deals with it in another way; `benchmarks/soak` has every moment."""
LONGER = {"epochs": 60, "shuffle": True, "checkpoint_interval": 20}
SHARDED = {"max_weights_file_bytes": 30_000}
TWICE = (signal.SIGTERM, signal.SIGTERM)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, datasets_dir: Path) -> RunFolder:
    run = make_run(tmp_path_factory.mktemp("uninterrupted") / "run", **LONGER)
    assert train(run, datasets_dir).returncode == 0
    return run


@pytest.mark.long
def test_kills_change_nothing(uninterrupted: RunFolder, datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "killed", **LONGER, **SHARDED)
    rng = random.Random(0)
    late = [*sorted(IN_THE_LOOP.keys() - NEXT_TO_ANOTHER), *["at random"] * RANDOM_KILLS]
    rng.shuffle(late)
    kill_at("before meta.json", run, datasets_dir, count=3)  # so that all can resume
    for moment in KILLED_AT_THE_START:
        kill_at(moment, run, datasets_dir, count=1)
    for moment in late:
        if moment == "at random":
            kill_at_random(run, datasets_dir, rng)
        else:
            kill_at(moment, run, datasets_dir, count_of(moment, rng.randint(2, 4)))
    for moment in AT_THE_END:
        kill_at(moment, run, datasets_dir, count=0)
    finish(run, datasets_dir, uninterrupted)
    assert len(list(last_checkpoint(run).folder.glob("model-*.safetensors"))) > 2


@pytest.mark.long
def test_signals_lose_nothing(uninterrupted: RunFolder, datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "stopped", **LONGER)
    numbers = cycle([signal.SIGTERM, signal.SIGINT])
    stop_at("before meta.json", run, datasets_dir, signal.SIGINT, count=3)
    for moment, number in zip(SIGNALLED_AT_THE_START, numbers, strict=False):
        before = state_of(run)
        end_at(moment, run, datasets_dir, number)
        assert state_of(run) == before, moment
    for moment, number in zip(SIGNALLED_IN_THE_LOOP, numbers, strict=False):
        stop_at(moment, run, datasets_dir, number, count=count_of(moment, 3))
        saved = last_checkpoint(run)
        assert saved.step == len(losses(run)) - 1, moment
        if moment in ("before a validation", "in a validation"):
            assert (saved.step % 20, saved.meta.selection_loss) == (0, None), moment
            if moment == "before a validation":
                end_at(moment, run, datasets_dir, number)
            else:
                kill_at("between a late validation and its save", run, datasets_dir, count=1)
            assert last_checkpoint(run).folder == saved.folder, "a checkpoint was saved"
    for moment in ("before the weights are written", "between write and rename"):
        newest = last_checkpoint(run).step
        stop_at(moment, run, datasets_dir, *TWICE, count=3)
        assert last_checkpoint(run).step > newest, "the newest checkpoint is the one before"
    finish(run, datasets_dir, uninterrupted)


def finish(run: RunFolder, datasets_dir: Path, uninterrupted: RunFolder) -> None:
    finished = train(run, datasets_dir)
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert " WARNING " not in run.log.read_text()
    assert_same_outcome(run, uninterrupted)
    assert [path.name for path in (*run.path.glob(".*"), *run.checkpoints.glob(".*"))] == []
    for link in ("best", "latest"):
        assert step_of(run, link) == step_of(uninterrupted, link)


def count_of(moment: str, count: int) -> int:
    """Return the call to choose: a validation has four batches, and a save changes two links, as a
    start does, and the save of a validation that the start before did not end."""
    calls = {"in a validation": 4 * count - 2, "while links change": 2 * count - 1}
    return calls.get(moment, count)


def kill_at(moment: str, run: RunFolder, datasets_dir: Path, count: int) -> None:
    killed = train_with_fault(f"kill_at:{moment}:{count}", run, datasets_dir)
    assert killed.returncode == -signal.SIGKILL, f"{moment}: {killed.stderr}"


def end_at(moment: str, run: RunFolder, datasets_dir: Path, number: signal.Signals) -> None:
    """Send a signal before the first step, where the system ends the process."""
    ended = train_with_fault(f"signal_at:{moment}:1:{number.name}", run, datasets_dir)
    assert ended.returncode == -number, f"{moment}: {ended.stderr}"
    assert "Traceback" not in ended.stderr, f"{moment}: {ended.stderr}"


def stop_at(
    moment: str, run: RunFolder, datasets_dir: Path, *numbers: signal.Signals, count: int
) -> None:
    """Send signals to a run that takes steps."""
    names = ":".join(number.name for number in numbers)
    stopped = train_with_fault(f"signal_at:{moment}:{count}:{names}", run, datasets_dir)
    assert stopped.returncode == 128 + numbers[0], f"{moment}: {stopped.stderr}"
    assert "Traceback" not in stopped.stderr, f"{moment}: {stopped.stderr}"
    assert last_checkpoint(run).damage() == [], moment


def state_of(run: RunFolder) -> tuple[list[str], int]:
    """Return what a start that ends before its first step must not change."""
    return [c.folder.name for c in list_checkpoints(run.checkpoints)], len(losses(run))


def kill_at_random(run: RunFolder, datasets_dir: Path, rng: random.Random) -> None:
    """Kill within a third of a second after the first new step."""
    before = written_at(run)
    process = subprocess.Popen(
        command(run, datasets_dir), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and written_at(run) == before:
        time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    process.kill()
    assert process.wait() == -signal.SIGKILL, "the run ended before it was killed"


def step_of(run: RunFolder, link: str) -> str:
    return (run.checkpoints / link).readlink().name.partition("-")[2]


def written_at(run: RunFolder) -> int:
    return run.metrics.stat().st_mtime_ns if run.metrics.exists() else 0

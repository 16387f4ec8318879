"""Training killed by SIGKILL, over and over, ends where the uninterrupted run ends, bit by bit."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from killed_train import AT_THE_END, MOMENTS
from tiny_run import (
    ROOT,
    assert_same_outcome,
    command,
    last_checkpoint,
    make_dataset,
    make_run,
    train,
)

from run_folder import RunFolder

RANDOM_KILLS = 9
LONGER = {"epochs": 60, "shuffle": True, "checkpoint_interval": 20}
SHARDED = {"max_weights_file_bytes": 30_000}


def test_kills_change_nothing(tmp_path: Path) -> None:
    datasets_dir = tmp_path / "datasets"
    make_dataset(datasets_dir)
    straight = make_run(tmp_path / "straight", **LONGER)
    assert train(straight, datasets_dir).returncode == 0

    killed = make_run(tmp_path / "killed", **LONGER, **SHARDED)
    rng = random.Random(0)
    plan = [*(m for m in MOMENTS if m != AT_THE_END), *["at random"] * RANDOM_KILLS]
    rng.shuffle(plan)
    for moment in plan:
        if moment == "at random":
            kill_at_random(killed, datasets_dir, rng)
        else:
            kill_at(moment, killed, datasets_dir, count=rng.randint(2, 4))
    kill_at(AT_THE_END, killed, datasets_dir, count=0)
    finished = train(killed, datasets_dir)
    assert finished.returncode == 0, finished.stderr
    assert "Traceback" not in finished.stderr
    assert_same_outcome(killed, straight)
    assert len(list(last_checkpoint(killed).folder.glob("model-*.safetensors"))) > 2
    assert [path.name for path in killed.checkpoints.glob(".*")] == []
    for link in ("best", "latest"):
        assert step_of(killed, link) == step_of(straight, link)


def kill_at(moment: str, run: RunFolder, datasets_dir: Path, count: int) -> None:
    _, _, *arguments = command(run, datasets_dir)
    script = str(ROOT / "tests" / "killed_train.py")
    died = subprocess.run(
        [sys.executable, script, moment, str(count), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert died.returncode == -signal.SIGKILL, f"{moment}: {died.stderr}"


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
    assert process.wait() == -signal.SIGKILL, "the run was over before it was killed"


def step_of(run: RunFolder, link: str) -> str:
    return (run.checkpoints / link).readlink().name.partition("-")[2]


def written_at(run: RunFolder) -> int:
    return run.metrics.stat().st_mtime_ns if run.metrics.exists() else 0

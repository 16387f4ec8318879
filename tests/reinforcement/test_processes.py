"""Reinforcement learning in two processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.checks.resume import read_arrays
from rungs.reinforcement.rollout_files import RolloutFiles, read
from rungs.run.folder import RunFolder
from tests.support.committed_runs import ROOT
from tests.support.tiny_reinforcement import make_reinforcement_run, steps_of, write_start
from tests.support.two_processes import TIMEOUT_SECONDS, free_port


def command(run: RunFolder, *options: str) -> list[str]:
    return [sys.executable, str(ROOT / "reinforce.py"), str(run.path), *options]


def environment(devices: int) -> dict[str, str]:
    cpu = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
    return os.environ | cpu


@pytest.mark.long
def test_two_processes_do_what_one_does(tmp_path: Path) -> None:
    start, sharding = write_start(tmp_path / "start"), {"mode": "fsdp", "data": 2}
    keys = {"sharding": sharding, "steps": 3, "kl_coefficient": 0.1, "optimizer": "sgd"}
    keys |= {"prompts_per_step": 40, "microbatch_size": 16}  # too many verdicts for a short message
    one = make_reinforcement_run(tmp_path / "one", start, **keys)
    both = make_reinforcement_run(tmp_path / "both", start, **keys)
    subprocess.run(command(one), env=environment(2), check=True, timeout=TIMEOUT_SECONDS)
    address = ("--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2")
    processes = [
        subprocess.Popen(command(both, *address, "--process", str(number)), env=environment(1))
        for number in range(2)
    ]
    try:
        assert [process.wait(TIMEOUT_SECONDS) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    assert [step.global_step for step in steps_of(both)] == [0, 1, 2]
    for step in range(3):
        found, expected = (read(RolloutFiles(run.rollouts).step(step)) for run in (both, one))
        assert [c.tokens for c in found] == [c.tokens for c in expected]
        assert [c.rewards for c in found] == [c.rewards for c in expected]
    weights = [read_arrays(list_checkpoints(run.checkpoints)[-1])[0] for run in (both, one)]
    for name, array in weights[0].items():
        np.testing.assert_allclose(array, weights[1][name], rtol=1e-4, atol=1e-6, err_msg=name)

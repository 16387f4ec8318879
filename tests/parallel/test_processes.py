"""Two processes over loopback, two virtual devices each, train one run together."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from rungs.checkpointing.checkpoint_folder import list_checkpoints
from rungs.parallel import processes
from rungs.run import metrics
from rungs.run.folder import RunFolder
from tests.support.tiny_run import (
    MODEL,
    change,
    final_arrays,
    losses,
    make_dataset,
    make_run,
    train,
)
from tests.support.two_processes import train_to_end, two_processes

MESH = {"mode": "fsdp_tp", "data": 2, "tensor": 2}


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    return folder


@pytest.mark.long
def test_two_killed_processes_resume_and_match_one_process(
    datasets_dir: Path, tmp_path: Path
) -> None:
    """In data parallelism as on accelerators."""
    mesh, faults = {"mode": "dp", "data": 4}, ("trace_for:gpu",) * 2
    alone = make_run(tmp_path / "alone", sharding=mesh)
    assert train(alone, datasets_dir).returncode == 0
    killed = make_run(tmp_path / "killed", sharding=mesh)
    with two_processes(killed, datasets_dir, faults) as both:
        both.wait_for_step(12)
        for process in both.processes:
            process.kill()
    assert len(list_checkpoints(killed.checkpoints)) >= 1
    train_to_end(killed, datasets_dir, faults)
    assert state_sizes(killed) != state_sizes(alone)
    for found, expected in zip(losses(killed), losses(alone), strict=True):
        assert found[2] == pytest.approx(expected[2], rel=1e-6)
    one, other = final_arrays(killed), final_arrays(alone)
    for name, array in other.items():  # sums over processes may come in another order
        np.testing.assert_allclose(one[name], array, rtol=1e-3, atol=1e-5, err_msg=name)


def state_sizes(run: RunFolder) -> set[str]:
    """What each start of a run says that its arrays take on each device."""
    return set(re.findall("moments and gradients take (.*? MB)", run.log.read_text()))


@pytest.mark.long
def test_two_killed_processes_that_share_sequences_resume_on_one_device(
    datasets_dir: Path, tmp_path: Path
) -> None:
    """The devices of both processes have tokens of every sequence."""
    alone = make_run(tmp_path / "alone", sharding={"data": 1})
    shared = make_run(tmp_path / "shared", sharding={"mode": "cp", "context": 4})
    for run in (alone, shared):
        (run.path / "model.json").write_text(json.dumps(MODEL | {"n_heads": 4}))
    assert train(alone, datasets_dir).returncode == 0
    with two_processes(shared, datasets_dir) as both:
        both.wait_for_step(7)
        for process in both.processes:
            process.kill()
    assert list_checkpoints(shared.checkpoints)[-1].meta.sharding.context == 4
    change(shared, sharding={"data": 1})
    assert train(shared, datasets_dir).returncode == 0
    for found, expected in zip(all_losses(shared), all_losses(alone), strict=True):
        assert found == pytest.approx(expected, rel=1e-5)


def all_losses(run: RunFolder) -> list[list[float]]:
    """Of each step in training and, after some, in validation."""
    both = ((step.train_loss, step.validation_loss) for step in metrics.read(run.metrics))
    return [[loss for loss in of_step if loss is not None] for of_step in both]


@pytest.mark.parametrize("length", [0, 1, 4095, 4096, 100_000])
def test_a_broadcast_text_arrives_whole(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "is_multi_process", lambda: True)
    text = "é" * length
    assert processes.broadcast_from_first(lambda: text) == text


@pytest.mark.long
def test_a_killed_process_ends_the_other(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", sharding=MESH, min_train_tokens=128 * 140)
    with two_processes(run, datasets_dir) as both:
        both.wait_for_step(3)
        both.processes[1].kill()
        assert both.processes[0].wait(600) != 0

"""A run on 4 of 8 devices: where its arrays are, and that it is the run of a machine with 4."""

from pathlib import Path
from typing import Any

import jax
import pytest
from flax import nnx

from rungs.config.sharding_config import ShardingConfig
from rungs.parallel import devices
from rungs.training.trainer import Trainer
from tests.support.configs import model_config, train_config
from tests.support.starting import Killed, die_before, go, refusal
from tests.support.tiny_run import (
    MODEL,
    assert_same_outcome,
    change,
    last_checkpoint,
    make_dataset,
    make_run,
    train,
)

FOUR: dict[str, Any] = {"devices": 4}
KEYS: dict[str, Any] = {"min_train_tokens": 4 * 128, "checkpoint_interval": 2}
BY_EIGHT = {"microbatch_size": 8, "gradient_accumulation_steps": 1}


@pytest.fixture(scope="module")
def datasets_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("datasets")
    make_dataset(folder)
    return folder


@pytest.mark.parametrize(
    ("sharding", "sizes"),
    [
        ({}, (4, 1)),
        ({"mode": "fsdp"}, (4, 1)),
        ({"mode": "fsdp", "data": 4}, (4, 1)),
        ({"mode": "tp"}, (1, 4)),
        ({"mode": "fsdp_tp", "tensor": 2}, (2, 2)),
        ({"mode": "fsdp_tp", "data": 2}, (2, 2)),
        ({"mode": "fsdp_tp", "data": 2, "tensor": 2}, (2, 2)),
        ({"mode": "cp"}, (1, 4)),
        ({"mode": "cp", "data": -1, "context": 2}, (2, 2)),
    ],
)
def test_a_mesh_has_the_first_devices(sharding: dict[str, Any], sizes: tuple[int, int]) -> None:
    config = ShardingConfig(**sharding, **FOUR)
    assert config.sizes == sizes
    settings = train_config(microbatch_size=4, sharding=config.model_dump())
    mesh = devices.create_run_mesh(settings, model_config(n_heads=4), None)
    assert tuple(mesh.shape.values()) == sizes
    assert set(mesh.devices.flat) == set(jax.devices()[:4])
    assert devices.resolve_sharding(settings, 8).sizes == sizes
    assert devices.resolve_sharding(settings, None).sizes == sizes
    assert devices.cpu_device_count(settings, lambda: 1, None) == 4
    assert devices.idle_devices(settings, 4, 8) is None
    recorded = devices.recorded_sharding(settings, mesh).model_dump(mode="json")
    assert "devices" not in recorded  # another machine may have fewer


@pytest.mark.parametrize(
    ("sharding", "problem"),
    [
        ({"data": 3}, "devices: 4, but data 3 × tensor 1 makes 3"),
        ({"mode": "fsdp_tp", "tensor": 3}, "devices: 4, but data 1 × tensor 3 makes 3"),
        ({"mode": "fsdp_tp", "tensor": 4}, "needs data and tensor of at least 2, not 1 and 4"),
        ({"mode": "tp", "tensor": 8}, "devices: 4, but data 1 × tensor 8 makes 8"),
        ({"mode": "fsdp_tp"}, "needs data or tensor; one of them may be -1"),
        ({"devices": 0}, "devices"),
        ({"devices": -1}, "devices"),
        ({"mode": "cp", "devices": 1}, "'cp' needs context of at least 2"),
    ],
)
def test_sizes_that_do_not_make_the_devices_are_refused(
    sharding: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        ShardingConfig(**FOUR | sharding)


def test_devices_that_are_not_there_are_refused(
    datasets_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run", microbatch_size=16, sharding={"devices": 16})
    message = refusal(run, datasets_dir)
    assert message.endswith(": sharding.devices: 16, but there are 8; at most 8")
    change(run, microbatch_size=4, sharding={"mode": "fsdp", "data": 4})
    assert message.startswith(str(run.path))
    assert refusal(run, datasets_dir).endswith('"devices": 4 would leave the others idle')
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    settings = train_config(microbatch_size=8, sharding=FOUR)
    with pytest.raises(ValueError, match="8 in 2 processes, and only a single process can leave"):
        devices.create_run_mesh(settings, model_config(), None)
    all_of_them = train_config(microbatch_size=8, sharding={"devices": 8})
    assert devices.create_run_mesh(all_of_them, model_config(), None).size == 8
    too_few = train_config(microbatch_size=8, sharding={"data": 4})
    with pytest.raises(ValueError, match=r"needs 4 devices; there are 8$"):
        devices.create_run_mesh(too_few, model_config(), None)


@pytest.mark.long
def test_a_run_on_four_of_eight_devices_is_that_of_four(
    datasets_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    messages: pytest.LogCaptureFixture,
) -> None:
    used = record_devices(monkeypatch)
    run = make_run(tmp_path / "eight", **KEYS, sharding={"mode": "fsdp", **FOUR})
    assert go(run, datasets_dir) == 0
    (line,) = [text for text in messages.messages if text.startswith("uses 4 of 8 devices")]
    assert line.endswith(": " + ", ".join(map(str, jax.devices()[:4])))
    assert used == [set(jax.devices()[:4])]
    machine_of_4 = make_run(tmp_path / "four", **KEYS, sharding={"mode": "fsdp", "data": 4})
    finished = train(machine_of_4, datasets_dir)
    assert finished.returncode == 0, finished.stderr
    assert "uses 4 of" not in machine_of_4.log.read_text()
    assert_same_outcome(run, machine_of_4)
    assert last_checkpoint(run).meta.sharding == last_checkpoint(machine_of_4).meta.sharding


def record_devices(monkeypatch: pytest.MonkeyPatch) -> list[set[jax.Device]]:
    """Return a list that gets the devices that have anything at the end of training."""
    used: list[set[jax.Device]] = []
    before = jax.live_arrays()
    run = Trainer.train

    def train_and_look(self: Trainer[Any], stop: Any) -> Any:
        last = run(self, stop)
        known = set(map(id, before))
        arrays = [array for array in jax.live_arrays() if id(array) not in known]
        used.append(set().union(*(array.devices() for array in arrays)))
        for state in (self.learner.model, self.learner.optimizer):
            for array in jax.tree.leaves(nnx.state(state)):
                assert array.devices() == set(jax.devices()[:4])
        return last

    monkeypatch.setattr(Trainer, "train", train_and_look)
    return used


@pytest.mark.long
@pytest.mark.usefixtures("messages")
def test_a_run_resumes_on_another_number_of_devices(datasets_dir: Path, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", **KEYS, **BY_EIGHT, sharding={"data": 8})
    with pytest.MonkeyPatch.context() as patch:
        die_before(2, patch)
        with pytest.raises(Killed):
            go(run, datasets_dir)
    change(run, sharding={"devices": 2})
    assert go(run, datasets_dir) == 0
    assert last_checkpoint(run).meta.sharding.data == 2


def test_a_model_that_four_devices_can_not_split_is_refused(
    datasets_dir: Path, tmp_path: Path
) -> None:
    assert MODEL["n_heads"] == 2
    run = make_run(tmp_path / "run", sharding={"mode": "tp", **FOUR})
    assert "n_heads: 2 is not divisible by the 4 devices" in refusal(run, datasets_dir)

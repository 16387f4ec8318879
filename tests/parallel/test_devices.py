"""Which devices a run takes, where `train.json` says and where it does not."""

import os
import re
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.parallel import devices
from tests.support.configs import model_config, train_config

COPY_BYTES = 10**6
"""Of a tiny model's weights, moments and gradients."""


def cores(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)


def train(microbatch_size: int, **sharding: Any) -> TrainConfig:
    return train_config(microbatch_size=microbatch_size, sharding=sharding or None)


def shape_of(mesh: Mesh) -> tuple[int, ...]:
    return tuple(mesh.shape.values())


@pytest.mark.parametrize(
    ("sharding", "sizes"),
    [
        ({}, (-1, 1)),
        ({"mode": "fsdp"}, (-1, 1)),
        ({"mode": "fsdp", "data": 4}, (4, 1)),
        ({"mode": "tp"}, (1, -1)),
        ({"mode": "tp", "tensor": 4}, (1, 4)),
        ({"mode": "fsdp_tp", "tensor": 2}, (-1, 2)),
        ({"mode": "fsdp_tp", "data": 2}, (2, -1)),
        ({"mode": "fsdp_tp", "data": 4, "tensor": 2}, (4, 2)),
        ({"mode": "cp"}, (1, -1)),
        ({"mode": "cp", "context": 4}, (1, 4)),
        ({"mode": "cp", "data": -1, "context": 4}, (-1, 4)),
        ({"mode": "cp", "data": 2, "tensor": 1}, (2, -1)),
    ],
)
def test_missing_sizes_have_the_default_of_the_mode(
    sharding: dict[str, Any], sizes: tuple[int, int]
) -> None:
    assert ShardingConfig(**sharding).sizes == sizes


@pytest.mark.parametrize(
    ("sharding", "problem"),
    [
        ({"mode": "zero3"}, "mode"),
        ({"mode": "dp", "tensor": 2}, "'dp' needs tensor 1, not 2"),
        ({"mode": "fsdp", "data": 2, "tensor": 2}, "'fsdp' needs tensor 1, not 2"),
        ({"mode": "fsdp", "tensor": -1}, "needs"),
        ({"mode": "tp", "data": 2}, "'tp' needs data 1, not 2"),
        ({"mode": "fsdp_tp", "data": 1, "tensor": 8}, "at least 2, not 1 and 8"),
        ({"mode": "fsdp_tp", "data": 8, "tensor": 1}, "at least 2, not 8 and 1"),
        ({"mode": "fsdp_tp"}, "needs data or tensor"),
        ({"mode": "fsdp_tp", "data": -1, "tensor": -1}, "one of them may be -1"),
        ({"mode": "cp", "tensor": 2}, "'cp' needs tensor 1, not 2"),
        ({"mode": "cp", "data": 8, "context": 1}, "'cp' needs context of at least 2"),
        ({"mode": "cp", "data": -1}, "needs data or context; one of them may be -1"),
        ({"mode": "fsdp", "context": 8}, "'fsdp' needs context 1, not 8; or use mode 'cp'"),
        ({"data": 0}, "data"),
        ({"data": -2}, "data"),
        ({"model": 2}, "model"),
    ],
)
def test_invalid_sharding_is_refused(sharding: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ShardingConfig(**sharding)


def test_an_indivisible_microbatch_is_refused_with_the_nearest_sizes() -> None:
    with pytest.raises(ValueError, match=r"microbatch_size: 6 .* the 4 devices .*; use 4 or 8"):
        train(6, data=4)
    with pytest.raises(ValueError, match=r"microbatch_size: 6 .* the 8 devices .*; use 8"):
        devices.create_run_mesh(train(6, mode="fsdp"), model_config(), None)


@pytest.mark.parametrize(
    ("sharding", "microbatch_size", "model", "shape"),
    [
        ({}, 16, {}, (8, 1)),
        ({}, 6, {}, (6, 1)),
        ({}, 7, {}, (7, 1)),
        ({}, 11, {}, (1, 1)),
        ({"mode": "dp"}, 8, {}, (8, 1)),
        ({"mode": "fsdp"}, 8, {"n_heads": 8}, (8, 1)),
        ({"mode": "tp"}, 3, {"n_heads": 8}, (1, 8)),
        ({"mode": "fsdp_tp", "tensor": 2}, 4, {}, (4, 2)),
        ({"mode": "fsdp_tp", "data": 2}, 2, {"n_heads": 4}, (2, 4)),
        ({"mode": "cp"}, 3, {"n_heads": 8}, (1, 8)),
        ({"mode": "cp", "data": -1, "context": 2}, 4, {}, (4, 2)),
    ],
)
def test_a_run_uses_all_devices_that_divide_its_batch(
    sharding: dict[str, Any], microbatch_size: int, model: dict[str, Any], shape: tuple[int, int]
) -> None:
    mesh = devices.create_run_mesh(train(microbatch_size, **sharding), model_config(**model), None)
    assert shape_of(mesh) == shape
    assert mesh.devices.flat[0] == jax.devices()[0]


@pytest.mark.parametrize(
    ("recorded", "microbatch_size", "count"),
    [
        ({"mode": "dp", "data": 2, "tensor": 1}, 16, 2),
        ({"mode": "dp", "data": 16, "tensor": 1}, 16, 8),
        ({"mode": "dp", "data": 1, "tensor": 1}, 6, 1),
        ({"mode": "fsdp", "data": 4, "tensor": 1}, 16, 8),
        ({"mode": "tp", "data": 1, "tensor": 4}, 16, 8),
    ],
)
def test_a_resumed_run_uses_as_many_devices_as_before_if_available(
    recorded: dict[str, Any], microbatch_size: int, count: int
) -> None:
    before = ShardingConfig(**recorded)
    mesh = devices.create_run_mesh(train(microbatch_size), model_config(), before)
    assert shape_of(mesh) == (count, 1)


@pytest.mark.parametrize(
    ("size", "used", "advice"),
    [
        (96, 1, '"sharding": {"mode": "dp"}'),  # as recorded by a checkpoint
        (6, 6, '"microbatch_size": 8, "sharding": {"mode": "dp"} would'),
        (20, 5, '"microbatch_size": 24, '),
    ],
)
def test_idle_devices_come_with_the_microbatch_that_uses_them(
    size: int, used: int, advice: str
) -> None:
    line = devices.idle_devices(train_config(microbatch_size=size), used, 8)
    assert line is not None
    assert line.startswith(f"{8 - used} of 8 devices are idle: ")
    assert advice in line
    if '"microbatch_size"' in advice:
        match = re.search(r'"microbatch_size": (\d+)', line)
        assert match
        devices.create_run_mesh(train(int(match[1]), mode="dp"), model_config(), None)


def test_no_device_is_idle_if_all_are_used_or_the_config_says_how_many() -> None:
    assert devices.idle_devices(train(16), 8, 8) is None
    assert devices.idle_devices(train(16, data=2), 2, 8) is None


def test_all_sharding_problems_are_reported_at_once() -> None:
    settings = train(6, mode="fsdp_tp", data=-1, tensor=2)
    with pytest.raises(ValueError, match="is not divisible") as raised:
        devices.create_run_mesh(settings, model_config(n_heads=1, ffn_dim=15, emb_dim=18), None)
    keys = [line.partition(":")[0] for line in str(raised.value).splitlines()]
    assert keys == ["emb_dim", "n_heads", "ffn_dim", "microbatch_size"]


def test_context_must_divide_the_tokens_of_a_sequence() -> None:
    lengths = train(4, mode="cp", data=2).model_copy(update={"sequence_length": 6})
    with pytest.raises(ValueError, match=r"sequence_length: 6 .* sharding.context; use 4 or 8"):
        devices.create_run_mesh(lengths, model_config(n_heads=4), None)


def test_a_checkpoint_records_the_mesh() -> None:
    settings = train(4, mode="fsdp_tp", tensor=2)
    mesh = devices.create_run_mesh(settings, model_config(), None)
    assert devices.recorded_sharding(settings, mesh) == ShardingConfig(
        mode="fsdp_tp", data=4, tensor=2
    )
    settings = train(4, mode="cp", data=2)
    mesh = devices.create_run_mesh(settings, model_config(n_heads=4), None)
    recorded = devices.recorded_sharding(settings, mesh)
    assert recorded == ShardingConfig(mode="cp", data=2, context=4)
    assert ShardingConfig.model_validate(recorded.model_dump(mode="json")) == recorded
    unasked = devices.create_run_mesh(train(16), model_config(), None)
    assert devices.recorded_sharding(train(16), unasked) == ShardingConfig(
        mode="dp", data=8, tensor=1
    )
    # what was recorded before there was a context axis
    older = {"mode": "fsdp", "data": 8, "tensor": 1}
    assert ShardingConfig.model_validate(older).model_dump(mode="json") == older


@pytest.mark.parametrize(
    ("available", "microbatch_size", "sharding", "processes", "count"),
    [
        (6, 12, {}, 1, 1),
        (4, 10, {}, 2, 1),
        (6, 12, {"mode": "dp"}, 1, 6),
        (6, 12, {"data": 4}, 1, 4),
        (6, 12, {"mode": "fsdp"}, 1, 6),
        (6, 12, {"mode": "fsdp_tp", "data": 4, "tensor": 2}, 1, 8),
        (6, 12, {"mode": "fsdp_tp", "tensor": 2}, 1, 6),
        (5, 12, {"mode": "fsdp_tp", "tensor": 2}, 1, 4),
        (2, 12, {"mode": "tp", "tensor": 4}, 1, 4),
        (6, 12, {"mode": "tp"}, 1, 6),
        (6, 12, {"mode": "cp"}, 1, 6),
        (2, 12, {"mode": "cp", "data": 2, "context": 4}, 1, 8),
        (2, 8, {"data": 8}, 2, 4),
        (2, 8, {"mode": "fsdp_tp", "data": 4, "tensor": 2}, 4, 2),
    ],
)
def test_a_cpu_is_one_device_unless_a_mesh_asks_for_more(
    monkeypatch: pytest.MonkeyPatch,
    available: int,
    microbatch_size: int,
    sharding: dict[str, Any],
    processes: int,
    count: int,
) -> None:
    cores(monkeypatch, available)
    settings = train(microbatch_size, **sharding)
    assert devices.cpu_device_count(settings, lambda: COPY_BYTES, None, processes) == count


@pytest.mark.parametrize(
    ("available", "copy_bytes", "microbatch_size", "count"),
    [
        (64, 10**6, 64, 8),  # more have not been measured
        (64, 10**6, 12, 6),
        (64, 3 * 10**9, 64, 4),  # 5 copies take half of the memory, and 4 divides 64
        (64, 30 * 10**9, 64, 2),
        (2, 30 * 10**9, 64, 2),
        (1, 30 * 10**9, 64, 1),
    ],
)
def test_a_run_that_samples_has_a_device_per_core_if_copies_of_the_weights_leave_memory(
    monkeypatch: pytest.MonkeyPatch,
    available: int,
    copy_bytes: int,
    microbatch_size: int,
    count: int,
) -> None:
    cores(monkeypatch, available)
    monkeypatch.setattr(TrainConfig, "SAMPLES", True)
    monkeypatch.setattr(devices, "memory_bytes", lambda: 32e9)
    assert devices.cpu_device_count(train(microbatch_size), lambda: copy_bytes, None) == count
    recorded = ShardingConfig(mode="dp", data=microbatch_size, tensor=1)
    expected = microbatch_size if microbatch_size <= available else count
    assert (
        devices.cpu_device_count(train(microbatch_size), lambda: copy_bytes, recorded) == expected
    )
    asked = train(microbatch_size, data=microbatch_size)
    assert devices.cpu_device_count(asked, lambda: copy_bytes, None) == microbatch_size


def test_a_cpu_has_the_devices_of_the_last_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cores(monkeypatch, 6)
    recorded = ShardingConfig(mode="dp", data=3, tensor=1)
    assert devices.cpu_device_count(train(12), lambda: COPY_BYTES, recorded) == 3
    cores(monkeypatch, 2)
    assert devices.cpu_device_count(train(12), lambda: COPY_BYTES, recorded) == 1

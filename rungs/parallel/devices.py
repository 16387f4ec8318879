"""Which devices a run takes: what `sharding` in its `train.json` says or, where it says nothing,
what suits its batch."""

import contextlib
import math
import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from rungs.config.model_config import ModelConfig
from rungs.config.train_config import ShardingConfig, TrainConfig, indivisible_microbatch
from rungs.parallel.mesh import Layout, create_mesh

_CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


def cpu_devices(train: TrainConfig, recorded: ShardingConfig | None, processes: int = 1) -> int:
    """How many virtual devices each process has on a CPU: one per core, where a mesh of those is
    possible, as threads within one operation pay less than a device per core does.

    Args:
        recorded: mesh of the run's last checkpoint.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    available = (cores or 1) * processes
    if train.sharding is None:
        return max(_unasked(train, available, recorded) // processes, 1)
    data, tensor = train.sharding.sizes
    needed = abs(data * tensor)
    rest = max(available // needed, 1) if -1 in (data, tensor) else 1
    return max(needed * rest // processes, 1)


def memory_bytes() -> float:
    """Of this machine, or what a container may have of it; infinite where it does not say."""
    if not hasattr(os, "sysconf"):
        return math.inf
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # no container, or one without a limit
        limit = min(limit, int(_CGROUP_LIMIT.read_text()))
    return limit


def mesh_of(train: TrainConfig, model: ModelConfig, recorded: ShardingConfig | None) -> Mesh:
    """The mesh that a run trains on: of all devices, or fewer where one process trains and
    `train.json` does not say.

    Args:
        recorded: mesh of the run's last checkpoint.

    Raises:
        ValueError: a line for each reason why the devices, the mode, the model's dimensions and the
            batch do not go together.
    """
    if train.sharding is None and jax.process_count() == 1:
        data = _unasked(train, jax.device_count(), recorded)
        return create_mesh((data, 1), devices=jax.devices()[:data])
    mesh = create_mesh(train.sharding.sizes if train.sharding else (-1, 1))
    lines = Layout.of(train.sharding, mesh).problems(model)
    if line := indivisible_microbatch(train, mesh.shape["data"]):
        lines.append(line)
    if lines:
        raise ValueError("\n".join(lines))
    return mesh


def sharding_on(train: TrainConfig, available: int | None) -> ShardingConfig:
    """The mesh that a run has on so many devices, both sizes given.

    Args:
        available: None where nobody said how many there are: one, if `train.json` does not say.

    Raises:
        ValueError: a line that says why there is none.
    """
    if train.sharding is None:
        return ShardingConfig(mode="dp", data=_unasked(train, available or 1, None), tensor=1)
    data, tensor = train.sharding.sizes
    if -1 in (data, tensor):
        if available is None:
            raise ValueError("sharding: takes all devices there are; say how many with --sharding")
        rest = max(available // abs(data * tensor), 1)
        data, tensor = (rest if size == -1 else size for size in (data, tensor))
    return train.sharding.model_copy(update={"data": data, "tensor": tensor})


def recorded_of(train: TrainConfig, mesh: Mesh) -> ShardingConfig:
    """What a checkpoint records of the mesh."""
    mode = train.sharding.mode if train.sharding else "dp"
    return ShardingConfig(mode=mode, data=mesh.shape["data"], tensor=mesh.shape["tensor"])


def _unasked(train: TrainConfig, available: int, recorded: ShardingConfig | None) -> int:
    """Devices along `data` where `train.json` does not say: as many as before, if they are there;
    else all, or one where the microbatch does not divide by them."""
    before = recorded.data if recorded and recorded.mode == "dp" else None
    wanted = before if before and before <= available else available
    return wanted if train.microbatch_size % wanted == 0 else 1

"""Choose a run's devices: those of its `sharding`, else as many as divide its microbatch."""

import math
from collections.abc import Callable

import jax
from jax.sharding import AbstractMesh, Mesh

from rungs.common.machine import core_count, memory_bytes
from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import OptimizationConfig, indivisible_microbatch
from rungs.config.run_config import indivisible_sequence
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel.sharding import CONTEXT, DATA, Layout, create_mesh, size_along

MAX_CPU_DEVICES = 8
"""Most CPU devices of a reinforcement learning run by default. Each has a copy of the weights, all
of which are summed in every step; further cores work within operations."""
_MIN_CPU_DEVICES = 2
"""Least number of them, however large the copies."""
_COPIES_SHARE = 0.5
"""Share of memory for the copies of weights, moments and gradients; the rest is for activations."""
_DP_KEY = '"sharding": {"mode": "dp"}'
"""The key that uses all devices, regardless of the last checkpoint."""


def host_device() -> jax.Device | None:
    """Return the CPU of this process, None if JAX_PLATFORMS excludes it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def cpu_device_count(
    train: OptimizationConfig,
    copy_bytes: Callable[[], int],
    recorded: ShardingConfig | None,
    processes: int = 1,
) -> int:
    """Return how many virtual CPU devices each process uses.

    With `sharding`, its sizes decide; −1 takes all cores. Without, it is one, whose operations use
    all cores, unless the last checkpoint recorded more: each of several would compute the whole
    update. Sampling uses cores well only with one device each, so a run that samples has up to
    `MAX_CPU_DEVICES`, fewer if their copies would fill the memory.

    Args:
        copy_bytes: returns the bytes of one copy of weights, moments and gradients; only called for
            a run that samples.
        recorded: sharding in the run's last checkpoint.
        processes: number of processes that train the run together."""
    available = core_count() * processes
    if train.sharding is None:
        count = _recorded_data_size(train, available, recorded)
        if count is None and train.SAMPLES:
            fitting = _COPIES_SHARE * memory_bytes() / copy_bytes()
            copies = max(min(fitting, MAX_CPU_DEVICES), _MIN_CPU_DEVICES)
            count = _divisor(train, min(core_count(), int(copies)) * processes, processes)
        elif count is None:
            count = _divisor(train, processes, processes)
        return max(count // processes, 1)
    sizes = train.sharding.sizes
    needed = abs(math.prod(sizes))
    rest = max(available // needed, 1) if -1 in sizes else 1
    return max(needed * rest // processes, 1)


def create_run_mesh(
    train: OptimizationConfig, model: ModelConfig, recorded: ShardingConfig | None
) -> Mesh:
    """Return the mesh that a run trains on: all devices, or possibly fewer with a single process
    and either no `sharding` in `train.json`, or `devices` in it. `recorded` is the sharding in the
    run's last checkpoint. Raises ValueError with a line for each conflict between devices, mode,
    model and batch."""
    if train.sharding is None and jax.process_count() == 1:
        count = jax.device_count()
        data = _recorded_data_size(train, count, recorded) or _divisor(train, count)
        return create_mesh((data, 1), devices=jax.devices()[:data])
    sharding = train.sharding or ShardingConfig()
    mesh = create_mesh(sharding.sizes, sharding.axes, _devices_of(sharding))
    lines = Layout.of(sharding, mesh).problems(model) + indivisible_batch(model, train, mesh)
    if lines:
        raise ValueError("\n".join(lines))
    return mesh


def _devices_of(sharding: ShardingConfig) -> list[jax.Device]:
    """Return all devices, or the first ones if `devices` asks for fewer. Raises ValueError if there
    are not as many, or there are other processes, which may have none of them."""
    found, wanted = jax.devices(), sharding.devices
    if wanted is None or wanted == len(found):
        return found
    key = f"sharding.devices: {wanted}, but there are {len(found)}"
    if wanted > len(found):
        raise ValueError(f"{key}; at most {len(found)}")
    if jax.process_count() > 1:
        raise ValueError(
            f"{key} in {jax.process_count()} processes, and only a single process can leave some"
            " idle; remove the key, or start fewer processes or let them see fewer devices"
        )
    return found[:wanted]


def indivisible_batch(
    model: ModelConfig, train: OptimizationConfig, mesh: Mesh | AbstractMesh
) -> list[str]:
    """Return a line for each dimension of a microbatch that the mesh does not divide."""
    lines = (
        indivisible_microbatch(train, size_along(mesh, DATA)),
        indivisible_sequence(model, train, size_along(mesh, CONTEXT)),
    )
    return [line for line in lines if line]


def resolve_sharding(train: OptimizationConfig, available: int | None) -> ShardingConfig:
    """Return a run's sharding on `available` devices, with both sizes filled in. None means an
    unknown number, and one device without `sharding` in `train.json`. Raises ValueError if
    `train.json` asks for all devices and `available` is None."""
    if train.sharding is None:
        return ShardingConfig(mode="dp", data=_divisor(train, available or 1), tensor=1)
    sizes = dict(zip(train.sharding.axes, train.sharding.sizes, strict=True))
    if -1 in sizes.values():
        if available is None:
            raise ValueError("sharding: uses all devices; give their number with --sharding")
        rest = max(available // abs(math.prod(sizes.values())), 1)
        sizes = {axis: rest if size == -1 else size for axis, size in sizes.items()}
    return train.sharding.model_copy(update=sizes)


def recorded_sharding(train: OptimizationConfig, mesh: Mesh) -> ShardingConfig:
    """Return the sharding that a checkpoint records for the mesh."""
    first, last = mesh.shape.values()
    return ShardingConfig.of(train.sharding.mode if train.sharding else "dp", (first, last))


def _recorded_data_size(
    train: OptimizationConfig, available: int, recorded: ShardingConfig | None
) -> int | None:
    """Return the recorded number of devices along `data`, None if fewer are available."""
    before = (recorded.data or 0) if recorded and recorded.mode == "dp" else 0
    is_usable = 0 < before <= available and indivisible_microbatch(train, before) is None
    return before if is_usable else None


def _divisor(train: OptimizationConfig, most: int, processes: int = 1) -> int:
    """Return the largest device count, equal per process, that divides the microbatch, or 1."""
    counts = range(processes, most + 1, processes)
    return max((count for count in counts if not indivisible_microbatch(train, count)), default=1)


def idle_devices(train: OptimizationConfig, used: int, available: int) -> str | None:
    """Return a line that says how many devices a run leaves idle and how to use them, or None."""
    if train.sharding is not None or used == available:
        return None
    size = train.microbatch_size
    idle = f"{available - used} of {available} devices are idle:"
    if size % available == 0:
        return f"{idle} the last checkpoint used {used}; {_DP_KEY} would use all"
    larger = -(-size // available) * available
    keys = f'"microbatch_size": {larger}, {_DP_KEY}'
    return (
        f"{idle} microbatch_size {size} is not divisible by {available}; {keys} would use all,"
        " with more tokens per step"
    )

"""Advice if a step needs too much memory: where it goes, and which edits of `train.json` keep the
global batch and need less. `stored` is as for `memory.memory_of` everywhere."""

import bisect
import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from rungs.common.errors import OUT_OF_MEMORY_SIGNS, RunFailure
from rungs.common.machine import memory_bytes
from rungs.common.run_log import log
from rungs.common.shown_text import format_bytes
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.config.train_config import TrainConfig
from rungs.model.remat import LayerLoop, kept_scores, layer_loop, settings_from
from rungs.parallel import gpu_settings
from rungs.parallel.sharding import Layout
from rungs.planning.memory import MEMORY_LABELS, Dtypes, Memory, MemoryEstimates, memory_of
from rungs.step.state import shapes_of

USABLE_SHARE, MOST_SHARE = 0.9, 0.99
"""Shares of a device's memory that an edit may use; the rest is for what is not counted."""
MAX_EDITS = 3


class Edit(NamedTuple):
    """Keys of `train.json` to change, and the memory of the changed run."""

    keys: dict[str, Any]
    memory: Memory

    def __str__(self) -> str:
        return f"{json.dumps(self.keys)[1:-1]}  ({format_bytes(self.memory.total)})"


@contextlib.contextmanager
def report_out_of_memory(
    config: RunConfig, mesh: Mesh, stored: Dtypes | None = None
) -> Iterator[None]:
    """Turn JAX's out-of-memory error or a MemoryError into a RunFailure with advice."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        has_sign = any(sign in str(error) for sign in OUT_OF_MEMORY_SIGNS)
        if has_sign or isinstance(error, MemoryError):
            raise RunFailure("\n".join(["out of memory", *advice(config, mesh, stored)])) from error
        raise


def warn_if_too_large(config: RunConfig, mesh: Mesh, stored: Dtypes | None = None) -> None:
    """Log advice if a run needs too much memory on a CPU, where the system kills a process that
    runs out of memory without any message."""
    limit, is_cpu = device_bytes(mesh), mesh.devices.flat[0].platform == "cpu"
    may_not_fit = is_cpu and _rough_bytes(config) >= mesh.size * limit / 4
    if may_not_fit and memory_of(config, mesh, stored).total > limit:
        for line in ["this run needs more memory than there is", *advice(config, mesh, stored)]:
            log.warning("%s", line)


def advice(config: RunConfig, mesh: Mesh, stored: Dtypes | None = None) -> list[str]:
    """Return lines that say where a step's memory goes and which edits would fit."""
    memory, limit = memory_of(config, mesh, stored), device_bytes(mesh)
    devices = "one device" if mesh.size == 1 else f"each of {mesh.size} devices"
    total = format_bytes(memory.total)
    lines = [f"a step needs about {total} on {devices} with {format_bytes(limit)}:"]
    for name, size in memory.parts.items():
        lines.append(f"  {MEMORY_LABELS.get(name, name):12} {format_bytes(size):>10}")
    if mesh.devices.flat[0].platform == "gpu":
        lines.append(gpu_settings.share_advice("a GPU's memory"))
    # the run ran out of memory, so it needs more than this estimate
    return lines + remedies(config, mesh, min(limit, memory.total), stored)


def remedies(
    config: RunConfig, mesh: Mesh, limit: float, stored: Dtypes | None = None
) -> list[str]:
    """Return lines with the edits that would fit into `limit` bytes per device."""
    for share, would in ((USABLE_SHARE, "would fit"), (MOST_SHARE, "would just fit, if at all")):
        if fitting := list(edits(config, mesh, share * limit, stored)):
            return [
                f"these edits of train.json {would}, with the same global batch:",
                *(f"  {edit}" for edit in fitting),
            ]
    return [
        "no combination of microbatch_size and remat fits: use more devices that share the weights"
        ' ("sharding": {"mode": "fsdp"}), a shorter sequence_length, an optimizer with less state'
        " (lion, sgd, adafactor) or a smaller model"
    ]


def edits(
    config: RunConfig, mesh: Mesh, limit: float, stored: Dtypes | None = None
) -> Iterator[Edit]:
    """Yield the largest microbatch that fits into `limit` bytes per device for each remat setting
    and sharding mode, fastest first, at most `MAX_EDITS`."""
    shardings = _shardings(config, mesh)
    found = (_edits_of_sharding(config, mesh, limit, keys, stored) for keys in shardings)
    yield from itertools.islice(itertools.chain.from_iterable(found), MAX_EDITS)


def _edits_of_sharding(
    config: RunConfig, mesh: Mesh, limit: float, sharding: dict[str, Any], stored: Dtypes | None
) -> Iterator[Edit]:
    own, model = config.train, config.model
    base = TrainConfig.model_validate({**own.as_json(), **sharding})
    chosen = layer_loop(own, model)
    estimates = MemoryEstimates(RunConfig(model, base), mesh, stored)
    for remat in settings_from(chosen.remat):
        loop = chosen if remat == chosen.remat and not sharding else LayerLoop(remat, 1)
        for size in _microbatch_sizes(base, base.microbatch_size, mesh):
            split = _split(base, size) if size != base.microbatch_size else {}
            train = base.model_copy(update=loop.as_keys() | split)
            memory = estimates.of(RunConfig(model, train))
            if memory.total <= limit:
                changed = {key: v for key, v in loop.as_keys().items() if getattr(own, key) != v}
                yield Edit(sharding | changed | split, memory)
                break


def larger_microbatch(
    config: RunConfig, mesh: Mesh, limit: float, stored: Dtypes | None = None
) -> Edit | None:
    """Return the largest microbatch, above the run's, that fits `limit` bytes per device."""
    model, train = config
    sizes = _microbatch_sizes(train, train.sequences_per_step, mesh)
    larger = [size for size in sizes if size > train.microbatch_size]
    if not larger:
        return None
    estimates = MemoryEstimates(config, mesh, stored)
    for keys in (_split(train, size) for size in larger):
        memory = estimates.of(RunConfig(model, train.model_copy(update=keys)))
        if memory.total <= USABLE_SHARE * limit:
            return Edit(keys, memory)
    return None


def larger_step(
    config: RunConfig, mesh: Mesh, limit: float, stored: Dtypes | None = None
) -> Edit | None:
    """Return the largest multiple of a run's microbatch that fits `limit` bytes per device, if its
    step is one microbatch and a larger one fits."""
    model, train = config
    if train.microbatches_per_step > 1:
        return None
    estimates = MemoryEstimates(config, mesh, stored)

    def multiple(factor: int) -> Edit | None:
        keys = {"microbatch_size": factor * train.microbatch_size}
        memory = estimates.of(RunConfig(model, train.model_copy(update=keys)))
        return Edit(keys, memory) if memory.total <= USABLE_SHARE * limit else None

    too_large = 2
    while multiple(too_large):
        too_large *= 2
    between = range(too_large // 2, too_large)
    fitting = bisect.bisect_left(between, True, key=lambda factor: multiple(factor) is None)
    return multiple(between[fitting - 1]) if too_large > 2 else None


def _split(train: TrainConfig, size: int) -> dict[str, Any]:
    """Return the keys for microbatches of this size with the same sequences per step."""
    steps = train.sequences_per_step // size
    return {"microbatch_size": size, "gradient_accumulation_steps": steps}


def device_bytes(mesh: Mesh) -> float:
    """Return the memory of each device; virtual CPU devices share the machine's."""
    device = mesh.local_devices[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return memory_bytes() / len(mesh.local_devices)


def _shardings(config: RunConfig, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Yield keys that change where a step is computed, not its result."""
    yield {}
    is_dp = mesh.size > 1 and (config.train.sharding or ShardingConfig()).mode == "dp"
    if is_dp and not Layout(mesh, "fsdp").problems(config.model):
        yield {"sharding": {"mode": "fsdp", "data": mesh.size}}


def _microbatch_sizes(train: TrainConfig, largest: int, mesh: Mesh) -> Iterator[int]:
    """Yield sizes that divide the step's sequences and fill the devices evenly, largest first."""
    for size in range(largest, 0, -1):
        if train.sequences_per_step % size == 0 and size % mesh.shape["data"] == 0:
            yield size


def _rough_bytes(config: RunConfig) -> int:
    """Return an instant estimate of the bytes over all devices: weights, moments, gradients, and
    per token and layer ten vectors and, with dropout, the attention scores."""
    model, train = config
    numbers = sum(map(math.prod, shapes_of(model).values()))
    tokens = train.microbatch_size * config.sequence_length
    kept = 10 * model.emb_dim + kept_scores(train, model)
    return 4 * (5 * numbers + tokens * model.n_layers * kept)

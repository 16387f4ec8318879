"""What to say where a run needs more memory than there is: where it goes, and which keys of
`train.json` would have the same global batch in less."""

import contextlib
import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from rungs.common.errors import RunFailure
from rungs.config.run_config import RunConfig
from rungs.config.train_config import ShardingConfig, TrainConfig
from rungs.model.remat import settings_from
from rungs.parallel.devices import memory_bytes
from rungs.parallel.sharding import Layout
from rungs.planning.memory import Memory, memory_of, shown
from rungs.step.state import shapes_of

SIGNS = ("RESOURCE_EXHAUSTED", "Out of memory")
"""What XLA's messages have in them, on accelerators and on CPUs."""
USABLE_SHARE = 0.9
"""Of a device's memory: the rest is for what is not counted."""
MOST_EDITS = 3

log = logging.getLogger("rungs")


class Edit(NamedTuple):
    """Keys of `train.json` to change."""

    keys: dict[str, Any]
    memory: Memory


@contextlib.contextmanager
def explained(config: RunConfig, mesh: Mesh) -> Iterator[None]:
    """Raises RunFailure with what can be done, in place of JAX's error or a MemoryError, where a
    device or the host has run out of memory."""
    try:
        yield
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if isinstance(error, MemoryError) or any(sign in str(error) for sign in SIGNS):
            raise RunFailure("\n".join(["out of memory", *advice(config, mesh)])) from error
        raise


def warn_if_too_large(config: RunConfig, mesh: Mesh) -> None:
    """Say on a CPU what is going to happen: a system that runs out kills without a word."""
    if mesh.devices.flat[0].platform != "cpu":
        return
    limit = device_bytes(mesh)
    if _roughly(config) > mesh.size * limit / 4 and memory_of(config, mesh).total > limit:
        for line in ["this run needs more memory than there is", *advice(config, mesh)]:
            log.warning("%s", line)


def advice(config: RunConfig, mesh: Mesh) -> list[str]:
    """Lines: where the memory of a step goes, and the edits that would fit."""
    memory, limit = memory_of(config, mesh), device_bytes(mesh)
    parts = dataclasses.asdict(memory)
    parts["layer"] = max(memory.layer - memory.logits, 0)  # as the logits have gone
    lines = [
        f"a step needs about {shown(memory.total)} on {_devices(mesh)} of {shown(limit)}:",
        *(f"  {name:12} {shown(size):>10}" for name, size in parts.items()),
    ]
    # what has run out needs more than was thought
    return lines + remedies(config, mesh, min(limit, memory.total))


def remedies(config: RunConfig, mesh: Mesh, limit: float) -> list[str]:
    """Lines: the edits that would fit into so many bytes of each device."""
    if fitting := list(edits(config, mesh, USABLE_SHARE * limit)):
        return [
            "these edits of train.json keep the global batch as it is, and would fit:",
            *(f"  {_as_keys(edit.keys)}  ({shown(edit.memory.total)})" for edit in fitting),
        ]
    return [
        "no microbatch_size and remat would fit: it takes more devices that share the weights"
        ' ("sharding": {"mode": "fsdp"}), a shorter sequence_length, an optimizer that keeps less'
        " (lion, sgd, adafactor) or a smaller model"
    ]


def edits(config: RunConfig, mesh: Mesh, limit: float) -> Iterator[Edit]:
    """The largest microbatch that fits for each way to compute it, the fastest way first; at most
    `MOST_EDITS`.

    Args:
        limit: bytes of each device.
    """
    found = 0
    for keys in _ways(config, mesh):
        train = TrainConfig.model_validate({**config.train.as_json(), **keys})
        memory = memory_of(RunConfig(config.model, train), mesh)
        for size in _microbatch_sizes(train, mesh.shape["data"]):
            split = _split(train, size)
            cut = RunConfig(config.model, train.model_copy(update=split))
            smaller = memory.with_rows(cut, train.microbatch_size, mesh)
            if smaller.total <= limit:
                yield Edit(keys | split, smaller)
                found += 1
                break
        if found == MOST_EDITS:
            return


def device_bytes(mesh: Mesh) -> float:
    """Memory of each device; virtual CPU devices share that of the machine."""
    device = mesh.local_devices[0]
    stats = device.memory_stats() or {}
    if "bytes_limit" in stats:
        return float(stats["bytes_limit"])
    return memory_bytes() / len(mesh.local_devices)


def _ways(config: RunConfig, mesh: Mesh) -> Iterator[dict[str, Any]]:
    """Keys that change how a step is computed, not what it computes."""
    train, heavier = config.train, settings_from(config.train.remat)
    for remat in heavier:
        yield {} if remat == train.remat else {"remat": remat}
    is_dp = mesh.size > 1 and (train.sharding or ShardingConfig()).mode == "dp"
    if is_dp and not Layout(mesh, "fsdp").problems(config.model):
        sharding = {"mode": "fsdp", "data": mesh.size}
        for remat in heavier:
            yield {"sharding": sharding} | ({} if remat == train.remat else {"remat": remat})


def _microbatch_sizes(train: TrainConfig, data: int) -> Iterator[int]:
    """Those that divide the step's sequences and divide by the devices, the largest first, from
    the run's own on."""
    for size in range(train.microbatch_size, 0, -1):
        if train.sequences_per_step % size == 0 and size % data == 0:
            yield size


def _split(train: TrainConfig, size: int) -> dict[str, int]:
    if size == train.microbatch_size:
        return {}
    steps = train.sequences_per_step // size
    return {"microbatch_size": size, "gradient_accumulation_steps": steps}


def _roughly(config: RunConfig) -> int:
    """Bytes on all devices, a matter of an instant: weights, moments, gradients, and of each token
    ten vectors a layer."""
    model, train = config
    numbers = sum(map(math.prod, shapes_of(model).values()))
    tokens = train.microbatch_size * config.sequence_length
    return 4 * (5 * numbers + tokens * 10 * model.n_layers * model.emb_dim)


def _as_keys(keys: dict[str, Any]) -> str:
    return json.dumps(keys)[1:-1]


def _devices(mesh: Mesh) -> str:
    return "a device" if mesh.size == 1 else f"each of {mesh.size} devices"

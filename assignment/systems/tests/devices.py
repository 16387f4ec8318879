"""Four devices: functions on each of them, and what they send."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from assignment.systems.given import DATA, data_mesh
from rungs.planning import program

DEVICES = 4
EVERYWHERE, SPLIT = PartitionSpec(), PartitionSpec(DATA)


def on_each(function: Callable[..., Any], *specs: PartitionSpec) -> Callable[..., Any]:
    """Return a compiled function that runs on each device and returns all devices' results, with an
    axis of devices in front."""

    def stacked(*arguments: Any) -> Any:
        return jax.tree.map(lambda x: x[None], function(*arguments))

    mesh = data_mesh(DEVICES)
    return jax.jit(jax.shard_map(stacked, mesh=mesh, in_specs=specs, out_specs=SPLIT))


def sent(function: Any, *arguments: Any) -> Counter[str]:
    """Return the bytes of the results of a compiled function's collectives, by their kind."""
    found: Counter[str] = Counter()
    for one in program.collectives(function.lower(*arguments).compile()):
        found[one.kind] += one.result_bytes * one.trips
    return found


def memory(function: Any, *arguments: Any) -> int:
    """Return the bytes that a device needs beside arguments and results of a compiled function."""
    return function.lower(*arguments).compile().memory_analysis().temp_size_in_bytes


def bytes_of(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

"""What a training step sends between devices, from the traced step, and how long it takes at least.
Collectives that the compiler adds are left out, except the all-gather of updated weights; it may
also move some. `program.py` counts those of a compiled program."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from flax import nnx

from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.parallel.sharding import (
    DATA,
    TENSOR,
    Layout,
    abstract_mesh,
    padded_axis,
    sharded_axis,
    size_along,
)
from rungs.planning.compiled_step import equations, trace_step
from rungs.planning.hardware import Links
from rungs.planning.program import moved_bytes
from rungs.step.state import AbstractState

_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}
"""Kinds of collectives, as in `program.KINDS`, by JAX's primitive."""


class PlannedCollective(NamedTuple):
    """A collective of a step, as each device sees it."""

    kind: str
    """One of `program.KINDS`."""
    axes: tuple[str, ...]
    """Mesh axes along which it runs."""
    devices: int
    """Participating devices."""
    array_bytes: int
    """Size of the complete array: a sum, an all-gather's result, a reduce-scatter's operand."""
    runs_per_step: int

    @property
    def moved_bytes(self) -> int:
        """Bytes that one device sends in a step."""
        return self.runs_per_step * moved_bytes(self.kind, self.array_bytes, self.devices)


class Communication(NamedTuple):
    """Seconds for the communication of a step if all links reach their peak."""

    tensor: float
    """For activations, along the tensor axis and in all-to-alls; computation waits for it."""
    data: float
    """For weights and gradients, overlapped with computation."""

    def step_seconds(self, computing: float) -> float:
        """Return the seconds of a step with this much computation."""
        return max(computing + self.tensor, self.data)


def abstract_layout(sharding: ShardingConfig) -> Layout:
    """Return a layout without devices, for a mesh of any size. `sharding` must have both sizes."""
    mesh = abstract_mesh(sharding.sizes, sharding.axes)
    return Layout(mesh, sharding.mode)  # type: ignore[arg-type]


def communication_of(run: RunConfig, layout: Layout, links: Links) -> Communication:
    """Return the least communication time of a step. Raises ValueError, with why, if unknown."""
    seconds = {True: 0.0, False: 0.0}
    for one in planned_collectives(run, layout):
        is_waited_for = one.axes == (TENSOR,) or one.kind == "all-to-all"
        seconds[is_waited_for] += one.moved_bytes / link_bandwidth(one.axes, layout, links)
    return Communication(tensor=seconds[True], data=seconds[False])


def link_bandwidth(axes: tuple[str, ...], layout: Layout, links: Links) -> float:
    """Return the bytes per second that a device sends in a collective along mesh axes. Islands of
    devices lie along the last axis of the mesh, then along `data`. A ring leaves each island once,
    so it has the network of all its devices. Raises ValueError if that has an unknown speed."""
    mesh = layout.mesh
    is_last, last = axes == mesh.axis_names[-1:], mesh.axis_sizes[-1]
    if (last if is_last else mesh.size) <= links.island:
        return links.inner
    if links.outer is None:
        raise ValueError(f"the network between hosts (of {links.island} devices each) is not known")
    together = max(links.island // last, 1) if axes == (DATA,) else links.island
    return min(links.inner, together * links.outer)


def padded_shape(variable: nnx.Variable, layout: Layout) -> list[int]:
    """Return a parameter's shape on a layout's devices, vocabulary padding included."""
    shape = list(variable.get_value().shape)
    if (axis := padded_axis(variable)) is not None:
        shape[axis] = layout.padded_vocab_size(shape[axis])
    return shape


def planned_collectives(run: RunConfig, layout: Layout) -> list[PlannedCollective]:
    """Return the collectives of one global step with several devices."""
    step: Any = trace_step(run, layout.mesh)
    found = [*_collectives_in(step, layout), *_gathers_of_updated_weights(run, layout)]
    return [one for one in found if one.devices > 1]


def _collectives_in(step: Any, layout: Layout) -> Iterator[PlannedCollective]:
    for one, runs, _ in equations(step):
        if kind := _KINDS.get(one.primitive.name):
            over = one.params.get("axes", one.params.get("axis_name"))
            axes = tuple(over) if isinstance(over, tuple | list) else (over,)
            size = max(map(_bytes_of, (one.invars, one.outvars)))
            devices = size_along(layout.mesh, *axes)
            yield PlannedCollective(kind, axes, devices, size, runs)


def _bytes_of(variables: Any) -> int:
    return sum(one.aval.size * one.aval.dtype.itemsize for one in variables)


def _gathers_of_updated_weights(run: RunConfig, layout: Layout) -> Iterator[PlannedCollective]:
    """Yield the all-gathers after an update of which each device computed a part (ZeRO-1), for
    which the compiler is told only where the weights should be."""
    mesh: Any = layout.mesh
    state = AbstractState(run, 1, mesh)
    parts = state.weights_in(layout.for_updates)
    for name in sorted(state.trained):
        whole, part = state.weights[name], parts[name]
        axis = sharded_axis(part.sharding.spec)
        if axis is not None and whole.sharding != part.sharding:
            size = math.prod(whole.sharding.shard_shape(whole.shape)) * whole.dtype.itemsize
            devices = size_along(mesh, *axis.mesh_axes)
            yield PlannedCollective("all-gather", axis.mesh_axes, devices, size, 1)

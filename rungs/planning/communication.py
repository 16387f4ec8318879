"""The collectives of a training step on a mesh, computed from the configs without compiling. Small
ones are left out: sums of scalars, of the loss of tokens and of biases of experts. `program.py`
counts those of a compiled program, which differs where the compiler moves or drops some."""

import math
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from flax import nnx

from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.model.remat import RECOMPUTED, Recomputed, layer_loop
from rungs.optim.precision import dtype_of
from rungs.parallel.sharding import (
    BLOCKS,
    CONTEXT,
    DATA,
    LOOKED_UP,
    TENSOR,
    TOKEN_AXES,
    TOKEN_EMBEDDING,
    VOCABULARY,
    Layout,
    abstract_mesh,
    padded_axis,
    sharded_axis,
    size_along,
)
from rungs.planning.hardware import Links
from rungs.planning.program import moved_bytes
from rungs.step.state import abstract_model

FLOAT32_BYTES = INT32_BYTES = 4
Purpose = Literal["layer weights", "other weights", "gradients", "activations"]


class PlannedCollective(NamedTuple):
    """A collective of a step, as each device sees it."""

    purpose: Purpose
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
    """Return the collectives of one global step, by parameter and activation. If `remat` recomputes
    matmuls, every bias counts as gathered twice, although the backward pass does not need all of
    them. Raises ValueError for LoRA adapters, whose communication is not counted."""
    if run.train.lora:
        raise ValueError("lora: the communication of adapters is not known")
    step = _Step(run, layout)
    flat = nnx.to_flat_state(nnx.state(abstract_model(run.model)))
    found = [
        *(sent for path, variable in flat for sent in step.for_parameter(path, variable)),
        *step.for_activations(),
        *step.for_attention(),
        *step.for_lookups(),
    ]
    return [sent for sent in found if sent.devices > 1 and sent.moved_bytes]


class _Step(NamedTuple):
    """A run's step on the devices of a layout."""

    run: RunConfig
    layout: Layout

    @property
    def microbatches(self) -> int:
        return self.run.train.microbatches_per_step

    @property
    def recomputed(self) -> Recomputed:
        return RECOMPUTED[layer_loop(self.run.train, self.run.model).remat]

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch per device."""
        rows = self.run.train.microbatch_size // self.layout.mesh.shape[DATA]
        return rows * self.run.sequence_length // self._devices(CONTEXT)

    @property
    def element_bytes(self) -> int:
        """Bytes of an element in the compute dtype."""
        return dtype_of(self.run.train).itemsize

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes along which devices have different tokens; data if there are none."""
        return tuple(axis for axis in TOKEN_AXES if self._devices(axis) > 1) or (DATA,)

    def _devices(self, *axes: str) -> int:
        return size_along(self.layout.mesh, *axes)

    def _planned(
        self, purpose: Purpose, kind: str, axes: tuple[str, ...], array_bytes: int, runs: int
    ) -> PlannedCollective:
        return PlannedCollective(purpose, kind, axes, self._devices(*axes), array_bytes, runs)

    def for_parameter(
        self, path: tuple[Any, ...], variable: nnx.Variable
    ) -> Iterator[PlannedCollective]:
        """Yield the all-gathers of a weight and the sums of its gradients. Replicated parameters
        have one sum a step and, if each device updates only a part, one all-gather of the updated
        weights; gradients of embedded tokens are then exchanged with a single microbatch instead
        of the table's."""
        metadata, in_blocks = variable.get_metadata(), path[0] == BLOCKS
        axes, shape = metadata["axes"], padded_shape(variable, self.layout)
        spec, tokens = self.layout.spec(axes, shape), self.token_axes
        layers = shape[0] if in_blocks else 1
        is_tensor_split = TENSOR in spec
        size = math.prod(shape) // layers // (self._devices(TENSOR) if is_tensor_split else 1)
        is_matrix = metadata["inputs"] > 0
        is_cast = is_matrix and (in_blocks or VOCABULARY in axes)  # before the all-gather
        is_table = path[0] in LOOKED_UP
        if path[0] == TOKEN_EMBEDDING and self.run.model.tied_embeddings:
            is_table = False  # it is the head, too
        in_float32, runs = FLOAT32_BYTES * size, self.microbatches * layers
        in_compute_dtype = self.element_bytes * size
        purpose: Purpose = "layer weights" if in_blocks else "other weights"
        is_split = sharded_axis(spec) is not None
        if "head_dim" in axes and not is_tensor_split:  # used on each device's own heads
            summed = in_compute_dtype if is_split and is_cast else in_float32
            yield self._planned("gradients", "all-reduce", (TENSOR,), summed, runs)
        if is_split and not is_table:
            is_norm = any("norm" in str(part) for part in path)
            is_recomputed = self.recomputed.matmuls or (self.recomputed.elementwise and is_norm)
            gathers = 2 if in_blocks and (is_matrix or is_recomputed) else 1
            gathered = in_compute_dtype if is_cast else in_float32
            yield self._planned(purpose, "all-gather", tokens, gathered, gathers * runs)
            yield self._planned("gradients", "reduce-scatter", tokens, in_float32, runs)
        elif not is_split and sharded_axis(self.layout.for_updates.spec(axes, shape)) is None:
            yield self._planned("gradients", "all-reduce", tokens, layers * in_float32, 1)
        elif not is_split:
            yield self._planned(purpose, "all-gather", tokens, layers * in_float32, 1)
            if not (is_table and self.microbatches == 1):
                yield self._planned("gradients", "reduce-scatter", tokens, layers * in_float32, 1)

    def for_activations(self) -> Iterator[PlannedCollective]:
        """Yield the all-reduces along the tensor axis: forward of matmul results, in float32, and
        backward of the gradients of matmul inputs, in the compute dtype."""
        model, tokens = self.run.model, self.tokens
        sums = 1 if model.feed_forward == "none" else 2
        # recomputing later parts of the layer needs the sums before them
        again = sums - 1 if model.norm_placement == "before" else sums
        in_forward = sums + again * self.recomputed.matmuls
        for array_bytes, runs in [
            (FLOAT32_BYTES * tokens * model.emb_dim, 1 + model.n_layers * in_forward),
            (self.element_bytes * tokens * model.emb_dim, 1 + model.n_layers * sums),
            (FLOAT32_BYTES * tokens * model.value_width, 1),
            (self.element_bytes * tokens * model.value_width, 1),
        ]:
            count = runs * self.microbatches
            yield self._planned("activations", "all-reduce", (TENSOR,), array_bytes, count)

    def for_attention(self) -> Iterator[PlannedCollective]:
        """Yield the all-to-alls along the context axis: of queries, keys and values before
        attention, of its result afterwards, and of their gradients in the backward pass."""
        devices, model = self._devices(CONTEXT), self.run.model
        if devices == 1 or not model.n_heads:
            return
        kv_heads = max(model.n_kv_heads or model.n_heads, devices)
        head_bytes = self.element_bytes * self.tokens * model.head_width
        runs = (2 + self.recomputed.elementwise) * self.microbatches * model.n_layers
        for heads in (model.n_heads, kv_heads, kv_heads, model.n_heads):
            array_bytes = head_bytes * heads
            yield self._planned("activations", "all-to-all", (CONTEXT,), array_bytes, runs)

    def for_lookups(self) -> Iterator[PlannedCollective]:
        """Yield the exchanges between devices that have columns of a looked-up table: token ids,
        then the rows that they looked up, and the gradients of those rows."""
        layout = self.layout.for_updates if self.microbatches == 1 else self.layout
        tables = {"emb": self.run.model.emb_dim, "value": self.run.model.value_width}
        specs = {axis: layout.spec((VOCABULARY, axis), (1, tables[axis])) for axis in tables}
        columns = sum(tables[axis] for axis in tables if sharded_axis(specs[axis]))
        if not columns:
            return
        axes, runs = self.token_axes, self.microbatches
        ids = INT32_BYTES * self.tokens * self._devices(*axes)
        rows = FLOAT32_BYTES * self.tokens * columns
        yield self._planned("activations", "all-gather", axes, ids, runs)
        yield self._planned("activations", "all-to-all", axes, rows, 2 * runs)

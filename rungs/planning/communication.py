"""The collectives of a training step on a mesh, computed from the configs without compiling.
`compiled/collectives.py` counts those of a compiled program, which differs where the compiler moves
or drops some. Axis suffixes as in `rungs/model/gpt.py`."""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from flax import nnx

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.model.kernels import grouped_matmul
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
from rungs.planning.compiled.collectives import moved_bytes
from rungs.planning.hardware import Links
from rungs.step.state import abstract_model

FLOAT32_BYTES = INT32_BYTES = 4
Purpose = Literal["layer weights", "other weights", "gradients", "activations", "scalars"]


class PlannedCollective(NamedTuple):
    """A collective of a step, as each device sees it."""

    purpose: Purpose
    kind: str
    """One of `compiled.collectives.KINDS`."""
    axes: tuple[str, ...]
    """Mesh axes along which it runs."""
    devices: int
    """Participating devices."""
    array_bytes: int
    """Size of the complete array: a sum, an all-gather's result, a reduce-scatter's operand."""
    runs_per_step: int

    @property
    def moved_bytes(self) -> int:
        """Bytes that one device sends in a step, counted as in `compiled/collectives.py`."""
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


class ParameterLayout(NamedTuple):
    """A parameter as split by a layout."""

    axes: tuple[str, ...]
    size: int
    """Elements, in one layer, of this device's shard along the tensor axis."""
    layers: int
    """1 outside the blocks."""
    in_blocks: bool
    is_matrix: bool
    is_of_norm: bool
    is_split_over_data: bool
    """Whether it is split over the data axis, or in cp over data and context together."""
    is_updated_in_shards: bool
    """Whether each device along data updates only a part of it."""
    is_split_over_tensor: bool
    is_looked_up_only: bool
    """Whether it is a table that is looked up by token and not also the head."""

    @property
    def purpose(self) -> Purpose:
        """Purpose of its all-gathers."""
        return "layer weights" if self.in_blocks else "other weights"

    @property
    def has_partial_gradient(self) -> bool:
        """Whether it is replicated along the tensor axis but used on each device's own heads or
        hidden units, so that its gradient needs an all-reduce along that axis."""
        of_partial_sums = "experts" in self.axes and not self.is_matrix
        return not self.is_split_over_tensor and ("head_dim" in self.axes or of_partial_sums)

    @property
    def is_weighted_bias(self) -> bool:
        """Whether it is the output bias of experts that all tokens pass through: the gradient of an
        expert's weight is a product with it."""
        is_output_bias = self.axes == ("experts", "emb") and not self.is_matrix
        return is_output_bias and grouped_matmul.is_dense()

    @property
    def is_cast(self) -> bool:
        """Whether it is cast to the compute dtype before the all-gather: the layers' matrices and
        the head, which may be the token embedding."""
        return self.is_matrix and (self.in_blocks or VOCABULARY in self.axes)


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


def parameter_layouts(model: ModelConfig, layout: Layout) -> Iterator[ParameterLayout]:
    """Yield the layout of every parameter of a model."""
    for path, variable in nnx.to_flat_state(nnx.state(abstract_model(model))):
        metadata, in_blocks = variable.get_metadata(), path[0] == BLOCKS
        axes, shape = metadata["axes"], padded_shape(variable, layout)
        spec = layout.spec(axes, shape)
        layers = shape[0] if in_blocks else 1
        shards = size_along(layout.mesh, TENSOR) if TENSOR in spec else 1
        yield ParameterLayout(
            axes,
            math.prod(shape) // layers // shards,
            layers,
            in_blocks,
            metadata["inputs"] > 0,
            any("norm" in str(part) for part in path),
            sharded_axis(spec) is not None,
            sharded_axis(layout.for_updates.spec(axes, shape)) is not None,
            TENSOR in spec,
            path[0] in LOOKED_UP and not (path[0] == TOKEN_EMBEDDING and model.tied_embeddings),
        )


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
    step, parameters = _Step(run, layout), list(parameter_layouts(run.model, layout))
    found = [
        *(sent for parameter in parameters for sent in step.for_parameter(parameter)),
        *step.for_activations(),
        *step.for_attention(),
        *step.for_lookups(),
        *step.for_scalars(parameters),
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
        return self._present(*TOKEN_AXES) or (DATA,)

    def _present(self, *axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self._devices(axis) > 1)

    def _devices(self, *axes: str) -> int:
        return size_along(self.layout.mesh, *axes)

    def _planned(
        self, purpose: Purpose, kind: str, axes: tuple[str, ...], array_bytes: int, runs: int
    ) -> PlannedCollective:
        return PlannedCollective(purpose, kind, axes, self._devices(*axes), array_bytes, runs)

    def for_parameter(self, parameter: ParameterLayout) -> Iterator[PlannedCollective]:
        """Yield the all-gathers of a weight and the sums of its gradients."""
        runs, is_split = self.microbatches * parameter.layers, parameter.is_split_over_data
        in_float32 = FLOAT32_BYTES * parameter.size
        in_compute_dtype = self.element_bytes * parameter.size
        if parameter.has_partial_gradient:
            summed = in_compute_dtype if is_split and parameter.is_cast else in_float32
            yield self._planned("gradients", "all-reduce", (TENSOR,), summed, runs)
        if not is_split:
            yield from self._for_whole_parameter(parameter)
        elif not parameter.is_looked_up_only:
            gathered = in_compute_dtype if parameter.is_cast else in_float32
            gathers = (1 + self._is_gathered_twice(parameter)) * runs
            axes = self.token_axes
            yield self._planned(parameter.purpose, "all-gather", axes, gathered, gathers)
            yield self._planned("gradients", "reduce-scatter", axes, in_float32, runs)

    def _is_gathered_twice(self, parameter: ParameterLayout) -> bool:
        """Return whether the backward pass needs a weight again, or recomputes its uses."""
        is_recomputed = self.recomputed.elementwise and parameter.is_of_norm
        is_used_again = parameter.is_matrix or parameter.is_weighted_bias
        is_needed = is_used_again or self.recomputed.matmuls or is_recomputed
        return parameter.in_blocks and is_needed

    def _for_whole_parameter(self, parameter: ParameterLayout) -> Iterator[PlannedCollective]:
        """Yield the gradient sums of replicated parameters and, if each device updates only a part,
        the all-gather of the updated weights. With a single microbatch, gradients of embedded
        tokens are exchanged instead of the table's."""
        axes, array_bytes = self.token_axes, parameter.layers * FLOAT32_BYTES * parameter.size
        if not parameter.is_updated_in_shards:
            yield self._planned("gradients", "all-reduce", axes, array_bytes, 1)
            return
        yield self._planned(parameter.purpose, "all-gather", axes, array_bytes, 1)
        if not (parameter.is_looked_up_only and self.microbatches == 1):
            yield self._planned("gradients", "reduce-scatter", axes, array_bytes, 1)

    def for_activations(self) -> Iterator[PlannedCollective]:
        """Yield the all-reduces along the tensor axis: forward of matmul results, in float32, and
        backward of the gradients of matmul inputs, in the compute dtype."""
        model, tokens = self.run.model, self.tokens
        sums = 1 if model.feed_forward == "none" else 2
        # recomputing later parts of the layer needs the sums before them
        again = sums - 1 if model.norm_placement == "before" else sums
        recomputed = int(self.recomputed.matmuls)
        in_forward = sums + again * recomputed
        routed = tokens * (model.experts_per_token or 0)
        all_reduces = [
            (FLOAT32_BYTES * tokens * model.emb_dim, 1 + model.n_layers * in_forward),
            (self.element_bytes * tokens * model.emb_dim, 1 + model.n_layers * sums),
            (FLOAT32_BYTES * tokens * model.value_width, 1),
            (self.element_bytes * tokens * model.value_width, 1),
            (FLOAT32_BYTES * tokens, 3),  # of the loss: largest logit, sum, the target's logit
            (FLOAT32_BYTES * routed, model.n_layers),  # weights of the chosen experts
            (FLOAT32_BYTES * tokens, model.n_layers * self._split_norms * (2 + recomputed)),
        ]
        for array_bytes, runs in all_reduces:
            count = runs * self.microbatches
            yield self._planned("activations", "all-reduce", (TENSOR,), array_bytes, count)

    @property
    def _split_norms(self) -> int:
        """Number of norms in a layer whose elements are split: of queries and keys of all heads."""
        model = self.run.model
        if not model.qk_norm or model.qk_norm_scope == "head":
            return 0
        heads = model.n_heads or 1, model.n_kv_heads or model.n_heads or 1
        return sum(count % self._devices(TENSOR) == 0 for count in heads)

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

    def for_scalars(self, parameters: list[ParameterLayout]) -> Iterator[PlannedCollective]:
        """Yield the sums of each microbatch's metrics, its finite check, and the gradient norm."""
        model, axes = self.run.model, self.token_axes
        metrics = 2  # loss and weight
        if model.n_experts:
            metrics += model.n_layers * (1 + model.n_experts)
        sums = [
            (axes, metrics, self.microbatches),
            (self._present(*self.layout.mesh.axis_names), 1, self.microbatches),
            (axes, sum(parameter.is_updated_in_shards for parameter in parameters), 1),
            ((TENSOR,), sum(parameter.is_split_over_tensor for parameter in parameters), 1),
        ]
        for along, count, runs in sums:
            yield self._planned("scalars", "all-reduce", along, FLOAT32_BYTES * count, runs)

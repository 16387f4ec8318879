"""What the devices of a mesh send each other in a training step, computed from the configs.

`planned_collectives(run, layout)` lists the collectives that a step runs for each parameter and
activation, how often, and on how many bytes. Nothing is compiled. `compiled/collectives.py`
counts the same in a compiled program, which differs where the compiler moves or drops collectives.

Axis suffixes as in `rungs/model/gpt.py`.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from flax import nnx

from rungs.config.model_config import ModelConfig
from rungs.config.optimization_config import Remat
from rungs.config.run_config import RunConfig
from rungs.config.sharding_config import ShardingConfig
from rungs.model.kernels import grouped_matmul
from rungs.model.layer_loop import layer_loop
from rungs.model.remat import RECOMPUTED
from rungs.optim.precision import dtype_of
from rungs.parallel.mesh import abstract_mesh, size_along
from rungs.parallel.names import (
    BLOCKS,
    CONTEXT,
    DATA,
    TENSOR,
    TOKEN_AXES,
    TOKEN_EMBEDDING,
    VOCABULARY,
)
from rungs.parallel.sharding import Layout, padded_axis, sharded_axis
from rungs.planning.compiled.collectives import moved_bytes
from rungs.planning.hardware import Links
from rungs.step.state import abstract_model

FLOAT32_BYTES = INT32_BYTES = 4
Purpose = Literal["layer weights", "other weights", "gradients", "activations", "scalars"]


class PlannedCollective(NamedTuple):
    """A collective that a step runs, as each device sees it."""

    purpose: Purpose
    kind: str
    """One of `compiled.collectives.KINDS`."""
    axes: tuple[str, ...]
    """Mesh axes along which it runs."""
    devices: int
    """How many devices take part."""
    array_bytes: int
    """Size of the complete array: the one summed, the result of an all-gather, or the operand of a
    reduce-scatter."""
    runs_per_step: int
    """In one global step."""

    @property
    def moved_bytes(self) -> int:
        """Bytes that one device sends in a step, counted as in `compiled/collectives.py`."""
        return self.runs_per_step * moved_bytes(self.kind, self.array_bytes, self.devices)


class Communication(NamedTuple):
    """Seconds that the communication of a step takes if all links reach their peak."""

    tensor: float
    """Along the tensor axis, and in all-to-alls: of activations, for which computing waits."""
    data: float
    """Of weights and gradients, while something else is computed."""

    def step_seconds(self, computing: float) -> float:
        """Return the seconds of a step that computes for that long."""
        return max(computing + self.tensor, self.data)


class ParameterLayout(NamedTuple):
    """A parameter, and how a layout splits it."""

    axes: tuple[str, ...]
    size: int
    """Elements in one layer, of this device's shard along the tensor axis."""
    layers: int
    """1 outside the blocks."""
    in_blocks: bool
    is_matrix: bool
    is_of_norm: bool
    is_split_over_data: bool
    """In cp, over data and context together."""
    is_updated_in_shards: bool
    """Whether each device along data updates only a part of it, as it does if it has no more."""
    is_split_over_tensor: bool
    is_looked_up_only: bool
    """Whether it is the token embedding and not the head, too."""

    @property
    def has_partial_gradient(self) -> bool:
        """Whether it is replicated along the tensor axis but used on each device's own heads or
        hidden units, so that its gradient is an all-reduce along that axis."""
        of_partial_sums = "experts" in self.axes and not self.is_matrix
        return not self.is_split_over_tensor and ("head_dim" in self.axes or of_partial_sums)

    @property
    def is_weighted_bias(self) -> bool:
        """Whether it is the bias of all experts' outputs, where every token goes through every
        expert: the gradient of an expert's weight is a product with it."""
        is_output_bias = self.axes == ("experts", "emb") and not self.is_matrix
        return is_output_bias and grouped_matmul.is_dense()

    @property
    def is_cast(self) -> bool:
        """Whether it is cast to the compute dtype before the all-gather: the matrices of the layers
        and the head, which may be the token embedding."""
        return self.is_matrix and (self.in_blocks or VOCABULARY in self.axes)


def abstract_layout(sharding: ShardingConfig) -> Layout:
    """Return a layout that needs no devices, for a mesh of any size.

    Args:
        sharding: with both sizes given.
    """
    mesh = abstract_mesh(sharding.sizes, sharding.axes)
    return Layout(mesh, sharding.mode)  # type: ignore[arg-type]


def communication_of(run: RunConfig, layout: Layout, links: Links) -> Communication:
    """Return how long the communication of a step takes at least.

    Raises:
        ValueError: it is not known, for the reason that the message gives.
    """
    seconds = {True: 0.0, False: 0.0}
    for one in planned_collectives(run, layout):
        is_waited_for = one.axes == (TENSOR,) or one.kind == "all-to-all"
        seconds[is_waited_for] += one.moved_bytes / link_bandwidth(one.axes, layout, links)
    return Communication(tensor=seconds[True], data=seconds[False])


def link_bandwidth(axes: tuple[str, ...], layout: Layout, links: Links) -> float:
    """Return the bytes per second that a device sends in a collective along mesh axes.

    The devices of an island stand together along the last axis of the mesh and then along `data`. A
    ring leaves each island once, so it has the network of as many devices as it has in an island.

    Raises:
        ValueError: it uses a network of unknown speed.
    """
    mesh = layout.mesh
    is_last, last = axes == mesh.axis_names[-1:], mesh.axis_sizes[-1]
    if (last if is_last else mesh.size) <= links.island:
        return links.inner
    if links.outer is None:
        raise ValueError(f"the network between hosts (of {links.island} devices each) is not known")
    together = max(links.island // last, 1) if axes == (DATA,) else links.island
    return min(links.inner, together * links.outer)


def parameter_layouts(model: ModelConfig, layout: Layout) -> Iterator[ParameterLayout]:
    """Yield every parameter of a model."""
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
            path[0] == TOKEN_EMBEDDING and not model.tied_embeddings,
        )


def padded_shape(variable: nnx.Variable, layout: Layout) -> list[int]:
    """Return the shape that a parameter has on a layout's devices, vocabulary padding included."""
    shape = list(variable.get_value().shape)
    if (axis := padded_axis(variable)) is not None:
        shape[axis] = layout.padded_vocab_size(shape[axis])
    return shape


def planned_collectives(run: RunConfig, layout: Layout) -> list[PlannedCollective]:
    """Return the collectives of one global step, by parameter and activation.

    If `remat` recomputes matmuls, every bias counts as gathered twice, although the backward pass
    does not need all of them again.

    Raises:
        ValueError: the run trains LoRA adapters, whose communication is not counted.
    """
    if run.train.lora:
        raise ValueError("lora: the communication of adapters is not known")
    parameters = list(parameter_layouts(run.model, layout))
    found = [
        *(sent for parameter in parameters for sent in _for_parameter(parameter, run, layout)),
        *_for_activations(run, layout),
        *_for_attention(run, layout),
        *_for_lookups(run, layout),
        *_for_scalars(parameters, run, layout),
    ]
    return [sent for sent in found if sent.devices > 1 and sent.moved_bytes]


def _for_parameter(
    parameter: ParameterLayout, run: RunConfig, layout: Layout
) -> Iterator[PlannedCollective]:
    """Yield the all-gathers of weights and the sums of gradients."""
    along, tensor = _token_axes(layout), size_along(layout.mesh, TENSOR)
    data = size_along(layout.mesh, *along)
    runs = run.train.gradient_accumulation_steps * parameter.layers
    in_float32 = FLOAT32_BYTES * parameter.size
    in_compute_dtype = _compute_bytes(run) * parameter.size
    is_split = parameter.is_split_over_data
    if parameter.has_partial_gradient:
        summed = in_compute_dtype if is_split and parameter.is_cast else in_float32
        yield PlannedCollective("gradients", "all-reduce", (TENSOR,), tensor, summed, runs)
    if not is_split:
        yield from _for_whole_parameter(parameter, run, layout)
        return
    if parameter.is_looked_up_only:
        return
    is_gathered_twice = parameter.in_blocks and (
        parameter.is_matrix or parameter.is_weighted_bias or _is_recomputed(parameter, _remat(run))
    )
    gathered = in_compute_dtype if parameter.is_cast else in_float32
    purpose: Purpose = "layer weights" if parameter.in_blocks else "other weights"
    gathers = (1 + is_gathered_twice) * runs
    yield PlannedCollective(purpose, "all-gather", along, data, gathered, gathers)
    yield PlannedCollective("gradients", "reduce-scatter", along, data, in_float32, runs)


def _for_whole_parameter(
    parameter: ParameterLayout, run: RunConfig, layout: Layout
) -> Iterator[PlannedCollective]:
    """Yield the sum of the gradients of what every device has whole and, if each updates only a
    part of it, the all-gather of the updated weights. A single microbatch's gradients of embedded
    tokens are exchanged instead of the table's."""
    along, array_bytes = _token_axes(layout), parameter.layers * FLOAT32_BYTES * parameter.size
    data = size_along(layout.mesh, *along)
    if not parameter.is_updated_in_shards:
        yield PlannedCollective("gradients", "all-reduce", along, data, array_bytes, 1)
        return
    purpose: Purpose = "layer weights" if parameter.in_blocks else "other weights"
    yield PlannedCollective(purpose, "all-gather", along, data, array_bytes, 1)
    if not (parameter.is_looked_up_only and run.train.gradient_accumulation_steps == 1):
        yield PlannedCollective("gradients", "reduce-scatter", along, data, array_bytes, 1)


def _for_activations(run: RunConfig, layout: Layout) -> Iterator[PlannedCollective]:
    """Yield the all-reduces along the tensor axis: of matmul results in the forward pass, in
    float32, and of the gradients of matmul inputs in the backward pass, in the compute dtype."""
    devices, model = size_along(layout.mesh, TENSOR), run.model
    if devices == 1:
        return
    tokens, (sums, recomputed_sums) = _tokens(run, layout), _sums_per_layer(run)
    routed = tokens * (model.experts_per_token or 0)
    all_reduces = [
        (FLOAT32_BYTES * tokens * model.emb_dim, 1 + model.n_layers * (sums + recomputed_sums)),
        (_compute_bytes(run) * tokens * model.emb_dim, 1 + model.n_layers * sums),
        (FLOAT32_BYTES * tokens, 3),  # of the loss: largest logit, sum, the target's logit
        (FLOAT32_BYTES * routed, model.n_layers),  # weights of the chosen experts
    ]
    for array_bytes, runs in all_reduces:
        runs *= run.train.gradient_accumulation_steps
        yield PlannedCollective("activations", "all-reduce", (TENSOR,), devices, array_bytes, runs)


def _for_attention(run: RunConfig, layout: Layout) -> Iterator[PlannedCollective]:
    """Yield the all-to-alls along the context axis: before attention of queries, keys and values,
    after it of its result; in the backward pass of their gradients."""
    devices, model = size_along(layout.mesh, CONTEXT), run.model
    if devices == 1 or not model.n_heads:
        return
    kv_heads = max(model.n_kv_heads or model.n_heads, devices)
    head_bytes = _compute_bytes(run) * _tokens(run, layout) * model.head_width
    passes = 2 + RECOMPUTED[_remat(run)].elementwise
    runs = passes * run.train.gradient_accumulation_steps * model.n_layers
    for heads in (model.n_heads, kv_heads, kv_heads, model.n_heads):
        array_bytes = head_bytes * heads
        yield PlannedCollective("activations", "all-to-all", (CONTEXT,), devices, array_bytes, runs)


def _for_lookups(run: RunConfig, layout: Layout) -> Iterator[PlannedCollective]:
    """Yield what devices that have some columns of the token embedding exchange: token ids, then
    the rows that they looked up, and the gradients of those."""
    width, is_single = run.model.emb_dim, run.train.gradient_accumulation_steps == 1
    looked_up = layout.for_updates if is_single else layout
    if (split := sharded_axis(looked_up.spec((VOCABULARY, "emb"), (1, width)))) is None:
        return
    along, devices = split.mesh_axes, size_along(layout.mesh, *split.mesh_axes)
    runs, tokens = run.train.gradient_accumulation_steps, _tokens(run, layout)
    ids, rows = INT32_BYTES * tokens * devices, FLOAT32_BYTES * tokens * width
    yield PlannedCollective("activations", "all-gather", along, devices, ids, runs)
    yield PlannedCollective("activations", "all-to-all", along, devices, rows, 2 * runs)


def _for_scalars(
    parameters: list[ParameterLayout], run: RunConfig, layout: Layout
) -> Iterator[PlannedCollective]:
    """Yield the sums of each microbatch's metrics, its finite check, and the gradient norm."""
    model, along = run.model, _token_axes(layout)
    metrics = 2  # loss and weight
    if model.n_experts:
        metrics += model.n_layers * (1 + model.n_experts)
    microbatches = run.train.gradient_accumulation_steps
    sums = [
        (along, metrics, microbatches),
        (_present(layout, *layout.mesh.axis_names), 1, microbatches),
        (along, sum(parameter.is_updated_in_shards for parameter in parameters), 1),
        ((TENSOR,), sum(parameter.is_split_over_tensor for parameter in parameters), 1),
    ]
    for axes, count, runs in sums:
        devices, array_bytes = size_along(layout.mesh, *axes), FLOAT32_BYTES * count
        yield PlannedCollective("scalars", "all-reduce", axes, devices, array_bytes, runs)


def _remat(run: RunConfig) -> Remat:
    return layer_loop(run.train, run.model).remat


def _is_recomputed(parameter: ParameterLayout, remat: Remat) -> bool:
    """Whether the backward pass recomputes the operation that uses a vector."""
    recomputed = RECOMPUTED[remat]
    return recomputed.matmuls or (recomputed.elementwise and parameter.is_of_norm)


def _sums_per_layer(run: RunConfig) -> tuple[int, int]:
    """How often a layer's forward pass sums along the tensor axis, and how often its backward pass
    repeats that, because recomputing something later in the layer needs the sum."""
    sums = 1 if run.model.feed_forward == "none" else 2
    if not RECOMPUTED[_remat(run)].matmuls:
        return sums, 0
    return sums, sums - 1 if run.model.norm_placement == "before" else sums


def _tokens(run: RunConfig, layout: Layout) -> int:
    """Tokens of a microbatch on each device."""
    rows = run.train.microbatch_size // layout.mesh.shape[DATA]
    return rows * run.sequence_length // size_along(layout.mesh, CONTEXT)


def _token_axes(layout: Layout) -> tuple[str, ...]:
    """The mesh axes along which devices have different tokens; data if there are none."""
    return _present(layout, *TOKEN_AXES) or (DATA,)


def _present(layout: Layout, *axes: str) -> tuple[str, ...]:
    """Those mesh axes that have several devices."""
    return tuple(axis for axis in axes if size_along(layout.mesh, axis) > 1)


def _compute_bytes(run: RunConfig) -> int:
    """Bytes of one activation element."""
    return dtype_of(run.train).itemsize

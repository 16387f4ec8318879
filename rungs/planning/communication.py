"""What the devices of a mesh send one another in a training step, on paper.

`traffic(run, layout)` goes through a model's parameters and activations and says for each which
collectives the step runs, how often and on how many bytes. It reads the configs alone; nothing is
compiled. `collectives.py` counts the same in a compiled program, which differs where the compiler
moves or drops collectives.

Axes as in `model.py`.
"""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

from flax import nnx
from jax.sharding import AbstractMesh

from rungs.config.model_config import ModelConfig
from rungs.config.run_config import RunConfig
from rungs.config.train_config import Remat, ShardingConfig
from rungs.model.remat import RECOMPUTED
from rungs.optim.precision import dtype_of
from rungs.parallel.mesh import MESH_AXIS_NAMES
from rungs.parallel.names import BLOCKS, DATA, TENSOR, VOCABULARY
from rungs.parallel.sharding import Layout
from rungs.planning.compiled_communication import moved_bytes
from rungs.step.state import abstract_model

FLOAT32_BYTES = 4
Purpose = Literal["layers' weights", "other weights", "gradients", "activations", "scalars"]


class Sent(NamedTuple):
    """A collective that a step runs, as each device sees it."""

    purpose: Purpose
    kind: str
    """As in `collectives.KINDS`."""
    axes: tuple[str, ...]
    """Mesh axes along which it runs."""
    devices: int
    """How many take part."""
    whole_bytes: int
    """Of what is summed, or of all parts of what is gathered or handed out."""
    times: int
    """In one global step."""

    @property
    def moved_bytes(self) -> int:
        """What one device sends in a step, counted as `collectives.py` does."""
        return self.times * moved_bytes(self.kind, self.whole_bytes, self.devices)


class ParameterLayout(NamedTuple):
    """A parameter as the devices of a layout have it."""

    axes: tuple[str, ...]
    size: int
    """Elements, in one layer, of this device's part along the tensor axis."""
    layers: int
    """1 outside of the blocks."""
    in_blocks: bool
    is_matrix: bool
    is_of_norm: bool
    is_gathered: bool
    """Whether each device along the data axis has a part only."""
    is_split: bool
    """Whether each along the tensor axis has."""

    @property
    def meets_own_part(self) -> bool:
        """Whether devices along the tensor axis have the whole of it and yet use it on heads or
        hidden units of their own, so that its gradient is the sum of theirs."""
        of_partial_sums = "experts" in self.axes and not self.is_matrix
        return not self.is_split and ("head_dim" in self.axes or of_partial_sums)

    @property
    def is_cast(self) -> bool:
        """Whether it is gathered in the type of products: a layer's matrix, or the head."""
        return self.is_matrix and (self.in_blocks or self.axes[-1] == VOCABULARY)


def layout_without_devices(sharding: ShardingConfig) -> Layout:
    """The layout of a mesh of any size, to ask what would be where.

    Args:
        sharding: with both sizes given.
    """
    mesh = AbstractMesh(sharding.sizes, MESH_AXIS_NAMES)
    return Layout(mesh, sharding.mode)  # type: ignore[arg-type]


def parameters(model: ModelConfig, layout: Layout) -> Iterator[ParameterLayout]:
    """Every parameter of a model."""
    for path, variable in nnx.to_flat_state(nnx.state(abstract_model(model))):
        metadata, shape = variable.get_metadata(), list(variable.get_value().shape)
        axes, in_blocks = metadata["axes"], path[0] == BLOCKS
        if VOCABULARY in axes:
            shape[axes.index(VOCABULARY)] = layout.padded_vocab_size(model.vocab_size)
        spec = layout.spec(axes, shape)
        layers = shape[0] if in_blocks else 1
        parts = layout.mesh.shape[TENSOR] if TENSOR in spec else 1
        yield ParameterLayout(
            axes,
            math.prod(shape) // layers // parts,
            layers,
            in_blocks,
            metadata["inputs"] > 0,
            any("norm" in str(part) for part in path),
            DATA in spec,
            TENSOR in spec,
        )


def traffic(run: RunConfig, layout: Layout) -> list[Sent]:
    """What the step asks for, by parameter and activation.

    Where `remat` recomputes matmuls, every bias counts as gathered again, though the backward pass
    does not need all.

    Raises:
        ValueError: the run trains a low-rank addition, which is not counted.
    """
    if run.train.lora:
        raise ValueError("lora: what it sends is not counted")
    own = list(parameters(run.model, layout))
    for_parameters = (sent for one in own for sent in _for_parameter(one, run, layout))
    sent = (*for_parameters, *_for_activations(run, layout), *_for_scalars(own, run, layout))
    return [one for one in sent if one.devices > 1 and one.moved_bytes]


def _for_parameter(one: ParameterLayout, run: RunConfig, layout: Layout) -> Iterator[Sent]:
    """Weights made whole and gradients summed."""
    data, tensor = (layout.mesh.shape[axis] for axis in (DATA, TENSOR))
    times = run.train.gradient_accumulation_steps * one.layers
    whole, in_compute_dtype = FLOAT32_BYTES * one.size, _width(run) * one.size
    if one.meets_own_part:
        summed = in_compute_dtype if one.is_gathered and one.is_cast else whole
        yield Sent("gradients", "all-reduce", (TENSOR,), tensor, summed, times)
    if not one.is_gathered:
        yield Sent("gradients", "all-reduce", (DATA,), data, one.layers * whole, 1)
        return
    again = one.in_blocks and (one.is_matrix or _is_needed_again(one, run.train.remat))
    gathered = in_compute_dtype if one.is_cast else whole
    purpose: Purpose = "layers' weights" if one.in_blocks else "other weights"
    yield Sent(purpose, "all-gather", (DATA,), data, gathered, (1 + again) * times)
    yield Sent("gradients", "reduce-scatter", (DATA,), data, whole, times)


def _for_activations(run: RunConfig, layout: Layout) -> Iterator[Sent]:
    """What devices along the tensor axis sum: results of products forwards, in float32, and the
    gradients of what goes into products backwards, in the type they are computed in."""
    devices, model = layout.mesh.shape[TENSOR], run.model
    if devices == 1:
        return
    tokens, (joins, again) = _tokens(run, layout), _joins(run)
    routed = tokens * (model.experts_per_token or 0)
    sums = [
        (FLOAT32_BYTES * tokens * model.emb_dim, 1 + model.n_layers * (joins + again)),
        (_width(run) * tokens * model.emb_dim, 1 + model.n_layers * joins),
        (FLOAT32_BYTES * tokens, 3),  # of the loss: largest logit, sum, the target's logit
        (FLOAT32_BYTES * routed, model.n_layers),  # weights of the experts chosen
    ]
    for whole, times in sums:
        times *= run.train.gradient_accumulation_steps
        yield Sent("activations", "all-reduce", (TENSOR,), devices, whole, times)


def _for_scalars(own: list[ParameterLayout], run: RunConfig, layout: Layout) -> Iterator[Sent]:
    """What there is to tell of each microbatch, whether it is finite, and the gradient's norm."""
    model, sizes, axes = run.model, layout.mesh.shape, (DATA, TENSOR)
    told = 2  # loss and weight
    if model.n_experts:
        told += model.n_layers * (1 + model.n_experts)
    microbatches = run.train.gradient_accumulation_steps
    sums = [
        ((DATA,), told, microbatches),
        (tuple(axis for axis in axes if sizes[axis] > 1), 1, microbatches),
        ((DATA,), sum(one.is_gathered for one in own), 1),
        ((TENSOR,), sum(one.is_split for one in own), 1),
    ]
    for along, count, times in sums:
        devices = math.prod(sizes[axis] for axis in along)
        yield Sent("scalars", "all-reduce", along, devices, FLOAT32_BYTES * count, times)


def _is_needed_again(one: ParameterLayout, remat: Remat) -> bool:
    """Whether the backward pass computes again what a parameter is added to or multiplied with."""
    recomputed = RECOMPUTED[remat]
    return recomputed.matmuls or (recomputed.elementwise and one.is_of_norm)


def _joins(run: RunConfig) -> tuple[int, int]:
    """How often a layer joins products, and how often the backward pass does so again: where
    something in the layer needs the sum to be computed again itself."""
    joins = 1 if run.model.feed_forward == "none" else 2
    if not RECOMPUTED[run.train.remat].matmuls:
        return joins, 0
    return joins, joins - 1 if run.model.norm_placement == "before" else joins


def _tokens(run: RunConfig, layout: Layout) -> int:
    """Of a microbatch, on each device."""
    return run.train.microbatch_size // layout.mesh.shape[DATA] * run.sequence_length


def _width(run: RunConfig) -> int:
    """Bytes of an element of activations."""
    return dtype_of(run.train).itemsize

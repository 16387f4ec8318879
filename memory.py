"""Where the memory of a training step goes on each device, counted without computing anything; and
how it would go for a step that computes the same in less. Axes as in `model.py`.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from config import RunConfig
from data import sequence_length
from gathering import Gathering
from kernels.cross_entropy import chunk_tokens
from precision import dtype_of
from shard import DATA, TENSOR
from sharding import Layout
from state import AbstractArrays, AbstractState
from step import objective


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on each device while a step runs."""

    parameters: int
    moments: int
    """The optimizer's state."""
    gradients: int
    """Those of a microbatch, and the sum of them."""
    activations: int
    """What the forward pass of a microbatch keeps for the backward pass."""
    logits: int
    """Those of a chunk of a microbatch, in whose place come their exponentials, and their
    gradient."""
    recomputed: int
    """What the backward pass computes again of a layer; the logits have gone when it comes."""

    @property
    def total(self) -> int:
        held = self.parameters + self.moments + self.gradients + self.activations
        return held + max(self.logits, self.recomputed)

    def with_rows(self, config: RunConfig, before: int, mesh: Mesh) -> "Memory":
        """Of a config with another microbatch_size, where this is of one of `before`."""
        rows = config.train.microbatch_size
        activations, recomputed = (n * rows // before for n in (self.activations, self.recomputed))
        logits = _logits(config, mesh)
        return dataclasses.replace(
            self, activations=activations, recomputed=recomputed, logits=logits
        )


def memory_of(config: RunConfig, mesh: Mesh) -> Memory:
    """The memory of a run's step.

    Parameters, moments and gradients are exact. Activations are what the derivative of the loss
    keeps; the compiler drops some of it, and needs room for what comes between.

    Args:
        mesh: of devices there are, in the mode of `config.train.sharding`.
    """
    abstract = AbstractState(config, 1, mesh)
    trained = {name: abstract.weights[name] for name in abstract.trained}
    activations = _kept_for_backward(config, mesh, abstract)
    of_all_layers = activations
    if config.train.remat != "none":
        without = RunConfig(config.model, config.train.model_copy(update={"remat": "none"}))
        of_all_layers = _kept_for_backward(without, mesh, abstract)
    return Memory(
        parameters=_bytes_per_device(abstract.weights),
        moments=_bytes_per_device(abstract.optimizer),
        gradients=2 * _bytes_per_device(trained),
        activations=activations,
        logits=_logits(config, mesh),
        recomputed=max(of_all_layers - activations, 0) // max(config.model.n_layers, 1),
    )


def _logits(config: RunConfig, mesh: Mesh) -> int:
    """Bytes of the logits that are there at once, with what is made of them."""
    vocabulary = Layout(mesh).padded(config.model.vocab_size) // mesh.shape[TENSOR]
    rows = config.train.microbatch_size // mesh.shape[DATA]
    tokens = chunk_tokens(rows * sequence_length(config.train, config.model), vocabulary)
    each = jnp.float32.dtype.itemsize + dtype_of(config.train).itemsize
    return tokens * vocabulary * each


def _kept_for_backward(config: RunConfig, mesh: Mesh, abstract: AbstractState) -> int:
    """Bytes of a microbatch's activations.

    What is kept for twice as many sequences is compared: what has grown is theirs, the rest are
    weights.
    """
    rows = config.train.microbatch_size // mesh.shape[DATA]
    once, twice = (_residuals(config, mesh, abstract, count * rows) for count in (1, 2))
    return sum(_bytes(two) - _bytes(one) for one, two in zip(once, twice, strict=True))


def _residuals(
    config: RunConfig, mesh: Mesh, abstract: AbstractState, rows: int
) -> list[jax.ShapeDtypeStruct]:
    """What a device keeps of the forward pass of so many sequences for the backward pass."""
    train, layout = config.train, Layout.of(config.train.sharding, mesh)
    model, optimizer = abstract.fill(abstract.weights, abstract.optimizer)  # type: ignore[arg-type]
    graph, *states = nnx.split(model, optimizer.wrt, ...)
    gathering = Gathering(layout, model, dtype_of(train))
    found: list[jax.ShapeDtypeStruct] = []

    def on_each_device(
        trained: nnx.State, frozen: nnx.State, inputs_BS: Array, targets_BS: Array
    ) -> Array:
        def loss_of(trained: nnx.State) -> Array:
            model = nnx.merge(graph, trained, frozen, copy=True)
            batch = inputs_BS, targets_BS, jnp.arange(rows), jax.random.key(0)
            return objective(train, gathering, model, *batch)[0]

        _, pull = jax.vjp(loss_of, trained)
        found.extend(jax.typeof(leaf) for leaf in jax.tree.leaves(pull))
        return jnp.zeros(())

    batch = layout.batch_spec(2)
    shape = rows * mesh.shape[DATA], sequence_length(train, config.model)
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    jax.eval_shape(
        jax.shard_map(
            on_each_device,
            mesh=mesh,
            in_specs=(*map(layout.specs, states), batch, batch),
            out_specs=PartitionSpec(),
        ),
        *states,
        tokens,
        tokens,
    )
    return found


def _bytes_per_device(arrays: AbstractArrays) -> int:
    return sum(
        math.prod(array.sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array in arrays.values()
        if array.sharding is not None
    )


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize

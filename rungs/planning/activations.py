"""What the forward pass of a microbatch keeps for the backward pass, found by tracing the run's
objective."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from rungs.config.run_config import RunConfig
from rungs.model.gpt import GPT
from rungs.optim.multi_steps import MultiSteps
from rungs.optim.precision import dtype_of
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.names import DATA
from rungs.parallel.sharding import Layout
from rungs.step.forward import compute_of, on_mesh
from rungs.step.next_token import NextToken
from rungs.step.objective import Microbatch


class Activations(NamedTuple):
    """Bytes of activations on each device."""

    in_layers: int
    """Bytes in the loop over layers."""
    total: int
    widened: int
    """Total with 16-bit activations in float32."""


def activations_of(config: RunConfig, mesh: Mesh, model: GPT, optimizer: MultiSteps) -> Activations:
    """Return a microbatch's activations under the run's setting of `remat`.

    Compares one microbatch with one of twice as many sequences: what grows is activations, the
    rest is weights. The arrays of model and optimizer may be abstract.
    """
    rows = config.train.microbatch_size // mesh.shape[DATA]
    both = (_residuals(config, mesh, model, optimizer, count * rows) for count in (1, 2))
    in_layers = total = widened = 0
    for one, two in zip(*both, strict=True):
        growth = _bytes(two) - _bytes(one)
        in_layers += growth if one.shape[:1] == two.shape[:1] else 0  # the first axis is the layers
        total += growth
        widened += growth * (2 if one.dtype.itemsize == 2 else 1)
    return Activations(in_layers, total, widened)


def _residuals(
    config: RunConfig, mesh: Mesh, model: GPT, optimizer: MultiSteps, rows: int
) -> list[jax.ShapeDtypeStruct]:
    """Return what a device keeps for the backward pass of this many sequences."""
    train, layout = config.train, Layout.of(config.train.sharding, mesh)
    objective = NextToken(train)
    found: list[jax.ShapeDtypeStruct] = []

    def of_rows(model: GPT, gatherer: WeightGatherer, inputs_BS: Array, targets_BS: Array) -> Array:
        graph, *states = nnx.split(model, optimizer.wrt, ...)
        trainable, frozen = states
        starts_BS = inputs_BS if train.documents == "separate" else None
        arrays = inputs_BS, targets_BS, starts_BS
        microbatch = Microbatch(arrays, jnp.arange(rows), jax.random.key(0))

        def loss_of(trainable: nnx.State) -> Array:
            model = nnx.merge(graph, trainable, frozen, copy=True)
            return objective(model, compute_of(train, model, gatherer), microbatch)[0]

        _, pullback = jax.vjp(loss_of, trainable)
        found.extend(jax.typeof(leaf) for leaf in jax.tree.leaves(pullback))
        return jnp.zeros(())

    batch = layout.batch_spec(2)
    shape = rows * mesh.shape[DATA], config.sequence_length
    tokens = jax.ShapeDtypeStruct(shape, jnp.int32)
    graph, state = nnx.split(model)

    def traced(state: nnx.State, *tokens: Array) -> Array:
        parts = layout, nnx.merge(graph, state), dtype_of(train)
        passed: Array = on_mesh(*parts, of_rows, (batch, batch), PartitionSpec())(*tokens)
        return passed

    jax.eval_shape(traced, state, tokens, tokens)
    return found


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return math.prod(array.shape) * array.dtype.itemsize

"""Forward passes on a mesh: each device runs the model on its rows, with its shards of weights."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from rungs.config.optimization_config import OptimizationConfig
from rungs.config.train_config import TrainConfig
from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.model.remat import layer_loop
from rungs.optim.precision import dtype_of
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.sharding import Layout

OnRows = Callable[..., Any]
"""A function of a model, the gatherer of its layers, and this device's rows of arrays."""


def compute_of(train: OptimizationConfig, model: GPT, gatherer: WeightGatherer) -> Compute:
    """Return how to run a model by its `train.json`, with "auto" resolved. `gatherer` is of the
    model's sharded weights."""
    remat, unroll = layer_loop(train, model.config)
    logits_dtype = train.logits_dtype if isinstance(train, TrainConfig) else "float32"
    gather, kernel = gatherer.gather_layer, train.attention_kernel
    return Compute(dtype_of(train), remat, unroll, gather, logits_dtype, kernel)


def on_mesh(
    layout: Layout,
    model: GPT,
    dtype: jnp.dtype,
    function: OnRows,
    in_specs: tuple[PartitionSpec, ...],
    out_specs: Any,
) -> Callable[..., Any]:
    """Return a function of arrays that runs `function` with a model on each device.

    Args:
        dtype: compute dtype.
        function: gets a model whose weights outside the blocks are gathered.
        in_specs: sharding of the arrays.
        out_specs: sharding of the results."""
    graph, state = nnx.split(model)
    gatherer = WeightGatherer(layout.sharded_axes(state), dtype)

    def on_each_device(state: nnx.State, *arrays: Any) -> Any:
        model = nnx.merge(graph, state)
        gatherer.gather_outside_blocks(model)
        return function(model, gatherer, *arrays)

    specs = (layout.specs(state), *in_specs)
    sharded = jax.shard_map(on_each_device, mesh=layout.mesh, in_specs=specs, out_specs=out_specs)
    return functools.partial(sharded, state)


def replicated(layout: Layout, arrays: Any) -> Any:
    """Return arrays replicated on every device, inside a compiled function."""
    return jax.lax.with_sharding_constraint(arrays, NamedSharding(layout.mesh, PartitionSpec()))


ScoreStep = Callable[[GPT, Array, Array, Array], tuple[Array, Array]]


def make_score_step(dtype: jnp.dtype, layout: Layout) -> ScoreStep:
    """Return a compiled function of (model, inputs_BS, places_BT, targets_BT).

    It returns, for each row, the sum of the log-probabilities of its non-negative targets, and
    whether each of those is the most likely token; arguments as for `GPT.scores`. `dtype` is the
    compute dtype; `layout` is the model's, in mode `dp` or `fsdp`."""
    batch, rows = layout.batch_spec(2), layout.rows_spec()

    def of_rows(
        model: GPT, gatherer: WeightGatherer, inputs_BS: Array, places_BT: Array, targets_BT: Array
    ) -> tuple[Array, Array]:
        compute = Compute(dtype, gather=gatherer.gather_layer)
        log_probs_BT, is_largest_BT = model.scores(inputs_BS, places_BT, targets_BT, compute)
        return log_probs_BT.sum(axis=-1), is_largest_BT.all(axis=-1)

    def score_step(model: GPT, *arrays: Array) -> tuple[Array, Array]:
        scores = on_mesh(layout, model, dtype, of_rows, (batch,) * 3, (rows, rows))
        return replicated(layout, scores(*arrays))

    return nnx.jit(score_step)

"""Gradients of an objective, summed over the microbatches of a step. Inside `jax.shard_map`, each
device computes gradients of its part of the batch with its shards of the weights;
`parallel/fsdp.py` sums them over devices. Axes as in `model/gpt.py`, A microbatches."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from rungs.config.optimization_config import OptimizationConfig
from rungs.model.gpt import GPT
from rungs.model.kernels.float8 import Observed
from rungs.optim.precision import dtype_of
from rungs.parallel import collectives
from rungs.parallel.fsdp import GradientSum, WeightGatherer
from rungs.parallel.sharding import ALL_AXES, DATA, Layout
from rungs.step.forward import compute_of
from rungs.step.nonfinite import ALL_FINITE, first_nonfinite
from rungs.step.objective import Aux, Microbatch, Objective
from rungs.step.shortcuts import Shortcuts

REPLICATED = PartitionSpec()

Summed = tuple[nnx.State, Aux, Array]
"""The sum of the finite microbatches' gradients (undefined if none is finite) in the layout for
updates; each microbatch's aux, with the axis A; and each one's first non-finite array, as an index
into `nonfinite.checked_names`."""

Sources = tuple[nnx.State, nnx.State]
"""Variables to differentiate: `GradientSum.sources`, and `float8.Observed`."""


def summed_gradients(
    objective: Objective,
    train: OptimizationConfig,
    layout: Layout,
    model: GPT,
    wrt: Any,
    microbatches: int,
    shortcuts: Shortcuts | None = None,
) -> Callable[[tuple[Any, ...], Array, Array | None], Summed]:
    """Return a function of a step's batch, its random key and its loss scale, by which the
    gradients are divided again. The batch is a tuple of arrays (A, B, S), some possibly None.

    Each device accumulates gradients of its own part of the batch; at the end those of all devices
    are summed (`GradientSum`). Gradients of sharded parameters are instead reduce-scattered in each
    microbatch, as accumulating whole gradients would undo the memory savings of sharding.

    Args:
        wrt: the kind of variables to differentiate.
        microbatches: A.
        shortcuts: for padded texts, some possibly without weight."""
    graph, *states = nnx.split(model, wrt, Observed, ...)
    gradient_sum = GradientSum(layout, states[0], microbatches)
    split_axes = layout.sharded_axes(states[2]) | gradient_sum.gathered
    gatherer = WeightGatherer(split_axes, dtype_of(train))

    def on_each_device(
        trained: nnx.State,
        observed: nnx.State,
        frozen: nnx.State,
        batch: tuple[Any, ...],
        key: Array,
        scale: Array | None,
    ) -> Summed:
        def loss(sources: Sources, microbatch: Microbatch) -> tuple[Array, Aux]:
            weights = gradient_sum.weights(sources[0], trained)
            # Copy, as frozen parameters belong to the outer trace and cannot be changed here.
            model = nnx.merge(graph, weights, sources[1], frozen, copy=True)
            gatherer.gather_outside_blocks(model)
            loss, aux = objective.loss(model, compute_of(train, model, gatherer), microbatch)
            return loss if scale is None else loss * scale, aux

        differentiate = jax.value_and_grad(loss, has_aux=True)
        if shortcuts is not None:
            differentiate = shortcuts.around(differentiate, loss)
        varying = collectives.to_varying(observed, *ALL_AXES)
        sources = gradient_sum.sources(trained), varying
        add = functools.partial(_add_if_finite, differentiate, sources, key)
        if microbatches == 1:  # without memory for a sum
            only = jax.tree.map(lambda array: array[0], batch)
            total, results = add(None, (only, 0))
            results = jax.tree.map(lambda array: array[None], results)
        else:
            zeros = jax.tree.map(jnp.zeros_like, sources[0])
            total, results = jax.lax.scan(add, zeros, (batch, jnp.arange(microbatches)))
        total = gradient_sum.of(total)
        if scale is not None:
            total = jax.tree.map(lambda g: g / scale, total)
        return total, *results

    rows = layout.batch_spec(3)
    aux_specs = Aux(REPLICATED, REPLICATED, REPLICATED, rows, REPLICATED)  # type: ignore[arg-type]
    sharded: Callable[..., Summed] = jax.shard_map(
        on_each_device,
        mesh=layout.mesh,
        in_specs=(*map(layout.specs, states), rows, REPLICATED, REPLICATED),
        out_specs=(layout.for_updates.specs(states[0]), aux_specs, REPLICATED),
    )
    return functools.partial(sharded, *states)


def microbatch_of(part: tuple[tuple[Any, ...], Array | int], key: Array) -> Microbatch:
    """Return a microbatch from its arrays and its number in the step, inside `jax.shard_map`."""
    arrays, number = part
    rows = len(arrays[0])
    first_row = collectives.axis_index(DATA) * rows
    sequences_B = number * rows * collectives.axis_size(DATA) + first_row + jnp.arange(rows)
    return Microbatch(arrays, sequences_B, key)


def _add_if_finite(
    differentiate: Callable[..., tuple[tuple[Array, Aux], Sources]],
    sources: Sources,
    key: Array,
    total: nnx.State | None,
    part: tuple[tuple[Any, ...], Array | int],
) -> tuple[nnx.State, tuple[Aux, Array]]:
    """Add this device's gradient of a microbatch to `total`, unless its loss or a gradient is not
    finite on any device (docs/architecture.md, "What happens to a failed step"). Return the new
    total, and the microbatch's aux and first non-finite array.

    Args:
        total: of the previous microbatches; None for a single one, whose gradient is the total.
        part: the arrays of the microbatch, and its number."""
    (_, aux), (gradient, observed) = differentiate(sources, microbatch_of(part, key))
    if amaxes := jax.tree.leaves(observed):
        aux = aux._replace(observed_PL2=collectives.pmax(jnp.stack(amaxes), *ALL_AXES))
    with jax.named_scope("gradient_sum"):
        first = collectives.pmin(first_nonfinite((aux.loss, gradient)), *ALL_AXES)
    if total is None:
        return gradient, (aux, first)
    is_finite = first == ALL_FINITE
    with jax.named_scope("gradient_sum"):
        total = jax.tree.map(lambda t, g: t + jnp.where(is_finite, g, 0), total, gradient)
    return total, (aux, first)

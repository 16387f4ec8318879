"""Gradients of an objective, summed over the microbatches of a step.

Inside `jax.shard_map`, each device computes gradients of its part of the batch with its part of the
weights; `parallel/collectives.py` has the communication between devices.
Axes as in `model/gpt.py`, and A for the microbatches of one step.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec

from rungs.model.gpt import GPT
from rungs.parallel import collectives
from rungs.parallel.fsdp import GradientSum, WeightGatherer
from rungs.parallel.names import DATA
from rungs.parallel.sharding import Layout
from rungs.step.nonfinite import ALL_FINITE, first_nonfinite
from rungs.step.shortcuts import Shortcuts, take_shortcuts

REPLICATED = PartitionSpec()


class Objective(Protocol):
    """What a step minimizes."""

    def __call__(self, gatherer: WeightGatherer, model: GPT, *microbatch: Any) -> tuple[Array, Any]:
        """Return this device's share of the objective on a microbatch, and what else the step
        needs: a tuple whose `losses_A` is the loss of the microbatch.

        Args:
            gatherer: gathers the weights that the devices share.
            model: with this device's part of the weights.
            microbatch: this device's rows of the batch; then the index of each sequence within the
                step, and the key of the step.
        """
        ...


def summed_gradients(
    objective: Objective,
    dtype: jnp.dtype,
    layout: Layout,
    model: GPT,
    wrt: Any,
    batch: tuple[Array | None, ...],
    key: Array,
    scale: Array | None = None,
    aux_specs: Any = REPLICATED,
    shortcuts: Shortcuts | None = None,
) -> tuple[nnx.State, Any, Array]:
    """Return the sum of the finite microbatches' gradients (anything if none is finite) in the
    layout for updates, what the objective returns for each microbatch, and for each the index among
    `nonfinite.checked_names` of the first array that was not finite.

    Each device accumulates gradients of its own part of the batch; at the end those of all devices
    are added up (`GradientSum`). Gradients of sharded parameters are reduce-scattered in each
    microbatch instead, because accumulating whole gradients would take the memory that sharding
    saves.

    Args:
        dtype: to compute in.
        wrt: the kind of variables to differentiate.
        batch: arrays with axes A, B, S, of which some may be None.
        key: of the step.
        scale: loss scale; the gradients are divided by it again.
        aux_specs: how what the objective returns is laid out.
        shortcuts: for padded texts, of which some may have no weight.
    """
    graph, *states = nnx.split(model, wrt, ...)
    trained, frozen = states
    gradient_sum = GradientSum(layout, trained, microbatches=len(jax.tree.leaves(batch)[0]))
    split_axes = layout.sharded_axes(frozen) | gradient_sum.gathered
    gatherer = WeightGatherer(split_axes, dtype)
    rows = layout.batch_spec(3)

    def on_each_device(
        trained: nnx.State,
        frozen: nnx.State,
        scale: Array | None,
        batch: tuple[Array | None, ...],
        key: Array,
    ) -> tuple[nnx.State, Any, Array]:
        def objective_of(sources: nnx.State, *microbatch: Array | None) -> tuple[Array, Any]:
            weights = gradient_sum.weights(sources, trained)
            # Copy: frozen parameters belong to the outer trace and cannot be changed here.
            model = nnx.merge(graph, weights, frozen, copy=True)
            loss, aux = objective(gatherer, model, *microbatch)
            return loss if scale is None else loss * scale, aux

        sources = gradient_sum.sources(trained)
        own, aux, first_nonfinite_A = _accumulate(objective_of, sources, batch, key, shortcuts)
        total = gradient_sum.of(own)
        if scale is not None:
            total = jax.tree.map(lambda g: g / scale, total)
        return total, aux, first_nonfinite_A

    sharded_gradients = jax.shard_map(
        on_each_device,
        mesh=layout.mesh,
        in_specs=(*map(layout.specs, states), REPLICATED, rows, REPLICATED),
        out_specs=(layout.for_updates.specs(trained), aux_specs, REPLICATED),
    )
    return sharded_gradients(trained, frozen, scale, batch, key)


def _accumulate(
    objective_of: Callable[..., tuple[Array, Any]],
    trained: nnx.State,
    batch: tuple[Array | None, ...],
    key: Array,
    shortcuts: Shortcuts | None,
) -> tuple[nnx.State, Any, Array]:
    """Return this device's gradients, summed over microbatches, with each microbatch's aux and
    first non-finite array.

    A microbatch whose loss or gradient is not finite, on any device, is left out. A single
    microbatch needs no memory for a sum; its gradient is returned as it is.
    """
    count, rows = jax.tree.leaves(batch)[0].shape[:2]
    first_row = collectives.axis_index(DATA) * rows
    zeros = jax.tree.map(jnp.zeros_like, trained)

    def gradient_of(
        microbatch: tuple[Any, ...], index: Array | int
    ) -> tuple[nnx.State, tuple[Any, Array]]:
        sequences_B = index * rows * collectives.axis_size(DATA) + first_row + jnp.arange(rows)

        def with_gradient(*arrays_BS: Array) -> tuple[nnx.State, Any]:
            (_, aux), gradient = jax.value_and_grad(objective_of, has_aux=True)(
                trained, *arrays_BS, sequences_B, key
            )
            return gradient, aux

        def without_gradient(*arrays_BS: Array) -> tuple[nnx.State, Any]:
            _, aux = objective_of(trained, *arrays_BS, sequences_B, key)
            return zeros, aux

        if shortcuts is None:
            gradient, aux = with_gradient(*microbatch)
        else:
            gradient, aux = take_shortcuts(shortcuts, with_gradient, without_gradient, *microbatch)
        with jax.named_scope("gradient_sum"):
            nonfinite_index = collectives.pmin(first_nonfinite((aux.losses_A, gradient)))
        return gradient, (aux, nonfinite_index)

    def add(
        total: nnx.State, part: tuple[tuple[Any, ...], Array]
    ) -> tuple[nnx.State, tuple[Any, Array]]:
        gradient, (aux, nonfinite_index) = gradient_of(*part)
        is_finite = nonfinite_index == ALL_FINITE
        with jax.named_scope("gradient_sum"):
            total = jax.tree.map(lambda t, g: t + jnp.where(is_finite, g, 0), total, gradient)
        return total, (aux, nonfinite_index)

    if count == 1:
        total, results = gradient_of(jax.tree.map(lambda array: array[0], batch), 0)
        aux, first_nonfinite_A = jax.tree.map(lambda a: a[None], results)
    else:
        total, (aux, first_nonfinite_A) = jax.lax.scan(add, zeros, (batch, jnp.arange(count)))
    return total, aux, first_nonfinite_A

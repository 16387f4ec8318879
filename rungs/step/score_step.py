"""The compiled scores of texts: how likely their last tokens are, with rows split over devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.sharding import Layout

ScoreStep = Callable[[GPT, Array, Array, Array], tuple[Array, Array]]


def make_score_step(dtype: jnp.dtype, layout: Layout) -> ScoreStep:
    """Return a compiled function of (model, inputs_BS, places_BT, targets_BT).

    It returns, for each row, the sum of the log-probabilities of the targets that are not negative,
    and whether each of them is the most likely token; arguments as for `GPT.scores`.

    Args:
        dtype: to compute in.
        layout: of the model, in mode `dp` or `fsdp`.
    """
    replicated = NamedSharding(layout.mesh, PartitionSpec())
    batch, rows = layout.batch_spec(2), layout.rows_spec()

    def score_step(
        model: GPT, inputs_BS: Array, places_BT: Array, targets_BT: Array
    ) -> tuple[Array, Array]:
        graph, state = nnx.split(model)
        gatherer = WeightGatherer(layout.sharded_axes(nnx.state(model)), dtype)

        def on_each_device(
            state: nnx.State, inputs_BS: Array, places_BT: Array, targets_BT: Array
        ) -> tuple[Array, Array]:
            model = nnx.merge(graph, state)
            gatherer.gather_outside_blocks(model)
            compute = Compute(dtype, gather=gatherer.gather_layer)
            found = model.scores(inputs_BS, places_BT, targets_BT, compute)
            log_probs_BT, is_largest_BT = found
            return log_probs_BT.sum(axis=-1), is_largest_BT.all(axis=-1)

        scores = jax.shard_map(
            on_each_device,
            mesh=layout.mesh,
            in_specs=(layout.specs(state), batch, batch, batch),
            out_specs=(rows, rows),
        )(state, inputs_BS, places_BT, targets_BT)
        return jax.lax.with_sharding_constraint(scores, replicated)

    return nnx.jit(score_step)

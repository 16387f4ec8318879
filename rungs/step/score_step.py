"""The compiled scores of texts: how likely their last tokens are, with rows split over devices."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.model.blocks import Compute
from rungs.model.gpt import GPT
from rungs.parallel.sharding import Layout

ScoreStep = Callable[[GPT, Array, Array, Array], tuple[Array, Array]]


def make_score_step(dtype: jnp.dtype, mesh: Mesh) -> ScoreStep:
    """Return a compiled function of (model, inputs_BS, places_BT, targets_BT).

    It returns, for each row, the sum of the log-probabilities of the targets that are not negative,
    and whether each of them is the most likely token; arguments as for `GPT.scores`.

    Args:
        dtype: to compute in.
        mesh: of devices that each have the model.
    """
    layout = Layout(mesh)
    replicated = NamedSharding(mesh, PartitionSpec())
    batch, rows = layout.batch_spec(2), layout.rows_spec()

    def score_step(
        model: GPT, inputs_BS: Array, places_BT: Array, targets_BT: Array
    ) -> tuple[Array, Array]:
        graph, state = nnx.split(model)

        def on_each_device(
            state: nnx.State, inputs_BS: Array, places_BT: Array, targets_BT: Array
        ) -> tuple[Array, Array]:
            model = nnx.merge(graph, state)
            found = model.scores(inputs_BS, places_BT, targets_BT, Compute(dtype))
            log_probs_BT, is_largest_BT = found
            return log_probs_BT.sum(axis=-1), is_largest_BT.all(axis=-1)

        scores = jax.shard_map(
            on_each_device,
            mesh=mesh,
            in_specs=(PartitionSpec(), batch, batch, batch),
            out_specs=(rows, rows),
        )(state, inputs_BS, places_BT, targets_BT)
        return jax.lax.with_sharding_constraint(scores, replicated)

    return nnx.jit(score_step)

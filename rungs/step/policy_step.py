"""The compiled update of reinforcement learning, and log-probabilities under a frozen model.

The objective is a cross-entropy with a weight per token; `reinforcement/policy_weights.py` has the
weights. Axes as in `model/gpt.py`, and A for the microbatches of one update.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rungs.config.reinforce_config import ReinforceConfig
from rungs.model.feed_forward import Routing
from rungs.model.gpt import GPT
from rungs.model.kernels.cross_entropy import WeightOf
from rungs.optim.multi_steps import MultiSteps
from rungs.optim.precision import dtype_of
from rungs.parallel import collectives
from rungs.parallel.fsdp import WeightGatherer
from rungs.parallel.names import TOKEN_AXES
from rungs.parallel.sharding import Layout
from rungs.step.compute import compute_of
from rungs.step.gradients import REPLICATED, summed_gradients
from rungs.step.nonfinite import ALL_FINITE
from rungs.step.shortcuts import Shortcuts, at_shortest_length
from rungs.step.train_step import StepResult, is_overflow, update_parts


class PolicyResult(NamedTuple):
    """What an update returns to the host."""

    step: StepResult
    """Its losses are each microbatch's share of the objective, times the number of microbatches."""
    log_probs_ABS: Array
    """Of the targets before the update, after the temperature, in nats; 0 where a target does not
    count."""
    entropies_ABS: Array
    """Of the distributions that the targets are from."""


class PolicyAux(NamedTuple):
    """What the objective returns besides the loss."""

    losses_A: Array
    """Summed over devices."""
    log_probs_ABS: Array
    entropies_ABS: Array
    routing: Routing | None


PolicyStep = Callable[..., PolicyResult]


def make_policy_step(
    train: ReinforceConfig, weight_of: WeightOf, shortcuts: Shortcuts, mesh: Mesh | None = None
) -> PolicyStep:
    """Return a compiled function of (model, optimizer, inputs_ABS, targets_ABS, *extras_ABS) that
    does one update, in place.

    Args:
        weight_of: the weight of each token's loss; see `GPT.weighted_loss`. The weights contain
            what the objective is divided by.
        shortcuts: called with a microbatch of what the step is called with.
        mesh: the mesh that model and optimizer were created on; one device if absent.
    """
    layout = Layout.of(train.sharding, mesh)
    rows = layout.batch_spec(3)
    aux_specs = PolicyAux(REPLICATED, rows, rows, REPLICATED)  # type: ignore[arg-type]

    def objective(
        gatherer: WeightGatherer, model: GPT, *microbatch: Array
    ) -> tuple[Array, PolicyAux]:
        return _objective(train, weight_of, shortcuts.lengths[-1], gatherer, model, *microbatch)

    def policy_step(model: GPT, optimizer: MultiSteps, *batch_ABS: Array) -> PolicyResult:
        scaling = optimizer.loss_scale
        loss_scale = None if scaling is None else scaling.scale[...]
        key = jax.random.key(train.seed)  # there is no dropout
        gradient_sum, aux, first_nonfinite_A = summed_gradients(
            objective,
            dtype_of(train),
            layout,
            model,
            optimizer.wrt,
            batch_ABS,
            key,
            loss_scale,
            aux_specs,
            shortcuts,
        )
        if scaling is not None:
            scaling.adapt(is_overflow(first_nonfinite_A).any())
        weight = (first_nonfinite_A == ALL_FINITE).any().astype(jnp.float32)
        update = update_parts(layout, model, optimizer, gradient_sum, weight)
        count = len(first_nonfinite_A)
        step = StepResult(
            aux.losses_A * count,
            jnp.full(count, 1 / count),
            first_nonfinite_A,
            jnp.asarray(False),
            update.learning_rate,
            update.gradient_norm,
            update.clipped,
            aux.routing and Routing(aux.routing.counts_E.sum(0), aux.routing.balance_loss.mean()),
            loss_scale,
        )
        everywhere = NamedSharding(layout.mesh, REPLICATED)
        statistics = aux.log_probs_ABS, aux.entropies_ABS
        return PolicyResult(step, *jax.lax.with_sharding_constraint(statistics, everywhere))

    return nnx.jit(policy_step, donate_argnums=(0, 1))


def _objective(
    train: ReinforceConfig,
    weight_of: WeightOf,
    length: int,
    gatherer: WeightGatherer,
    model: GPT,
    inputs_BS: Array,
    targets_BS: Array,
    *rest: Array,
) -> tuple[Array, PolicyAux]:
    extras = rest[:-2]  # without the sequences' indices and the key, which are for dropout
    gatherer.gather_outside_blocks(model)
    compute = compute_of(train, model, gatherer)
    found = model.weighted_loss(
        inputs_BS, targets_BS, weight_of, extras, train.temperature, compute=compute
    )
    loss, routing = found.total, found.routing
    if routing is not None:
        balance = routing.balance_loss.mean() / train.microbatches_per_step
        loss += train.load_balancing_weight * balance
        routing = routing._replace(balance_loss=collectives.psum(routing.balance_loss, *TOKEN_AXES))
    summed_loss = collectives.psum(found.total, *TOKEN_AXES)
    log_probs_BS = _padded(found.log_probs_BS, length)
    entropies_BS = _padded(found.entropies_BS, length)
    return loss, PolicyAux(summed_loss, log_probs_BS, entropies_BS, routing)


LogProbStep = Callable[[GPT, Array, Array], Array]


def make_log_prob_step(
    train: ReinforceConfig, lengths: Sequence[int], mesh: Mesh | None = None
) -> LogProbStep:
    """Return a compiled function of (model, inputs_ABS, targets_ABS) that returns log_probs_ABS as
    in `PolicyResult`, without computing gradients.

    Args:
        lengths: see `Shortcuts`.
        mesh: the mesh that the model was created on; one device if absent.
    """
    layout = Layout.of(train.sharding, mesh)
    rows = layout.batch_spec(3)

    def log_prob_step(model: GPT, inputs_ABS: Array, targets_ABS: Array) -> Array:
        graph, state = nnx.split(model)
        gatherer = WeightGatherer(layout.sharded_axes(state), dtype_of(train))

        def on_each_device(state: nnx.State, *batch_ABS: Array) -> Array:
            model = nnx.merge(graph, state)
            gatherer.gather_outside_blocks(model)
            compute = compute_of(train, model, gatherer)

            def log_probs(inputs_BS: Array, targets_BS: Array) -> Array:
                found_BS = model.log_probs(inputs_BS, targets_BS, train.temperature, compute)
                return _padded(found_BS, lengths[-1])

            def of_microbatch(batch_BS: tuple[Array, ...]) -> Array:
                return at_shortest_length(log_probs, lengths, *batch_BS)

            return jax.lax.map(of_microbatch, batch_ABS)

        log_probs_ABS: Any = jax.shard_map(
            on_each_device,
            mesh=layout.mesh,
            in_specs=(layout.specs(state), rows, rows),
            out_specs=rows,
        )(state, inputs_ABS, targets_ABS)
        everywhere = NamedSharding(layout.mesh, PartitionSpec())
        log_probs: Array = jax.lax.with_sharding_constraint(log_probs_ABS, everywhere)
        return log_probs

    return nnx.jit(log_prob_step)


def _padded(array_BS: Array, length: int) -> Array:
    """Return an array with zeros at the end of S."""
    return jnp.pad(array_BS, [(0, 0), (0, length - array_BS.shape[1])])

"""The compiled global step.

Each device runs the same program on its part of the batch and of the weights, inside
`jax.shard_map`; `shard.py` says where one needs the others. The optimizer's update comes after, on
whole arrays, which the compiler divides.
Axes as in `model.py`, and A for the microbatches of one global step.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from rungs.config.train_config import TrainConfig
from rungs.model.feed_forward import Routing
from rungs.model.gpt import GPT, Compute
from rungs.model.layers import Dropout
from rungs.optim.optimizer import MultiSteps
from rungs.optim.precision import dtype_of
from rungs.parallel import collectives
from rungs.parallel.axes import DATA
from rungs.parallel.fsdp import Gathering
from rungs.parallel.mesh import Layout, is_spec, keep_layout
from rungs.step.nonfinite import NONE, NORM, first_not_finite


class StepResult(NamedTuple):
    """The small arrays that a global step hands to the host."""

    losses_A: Array
    """Cross-entropy of each microbatch, nats per target that counts."""
    weights_A: Array
    """Share of each microbatch's targets that count."""
    first_bad_A: Array
    """The first of `finite.suspects` that was not finite in the microbatch, which was left out;
    `finite.NONE` where all were."""
    skipped: Array
    """Whether the update was left out, as the step's loss was above its limit."""
    learning_rate: Array
    gradient_norm: Array
    clipped: Array
    routing: Routing | None
    """Mixture of experts: tokens per layer and expert (counts_LE) and the mean load-balancing
    loss, over all microbatches."""
    loss_scale: Array | None
    """What the loss was multiplied by, in float16."""

    @property
    def overflowed_A(self) -> np.ndarray:
        """Whether the microbatch was left out because gradients of a scaled loss overflowed, which
        a smaller scale mends."""
        first_bad_A = np.asarray(self.first_bad_A)
        is_scaled = self.loss_scale is not None and self.loss_scale > 1
        return is_scaled & overflows(first_bad_A)

    @property
    def finite_A(self) -> np.ndarray:
        """Whether the microbatch counted: its loss and gradient were finite, and the norm of all
        the gradients' sum."""
        return (np.asarray(self.first_bad_A) == NONE) & np.isfinite(self.gradient_norm)

    @property
    def loss(self) -> float | None:
        """Mean over the targets of the microbatches that counted, or overflowed; None where none
        did."""
        return self._mean_loss(self.finite_A | self.overflowed_A)

    @property
    def trained_loss(self) -> float | None:
        """The same of those that counted alone."""
        return self._mean_loss(self.finite_A)

    def _mean_loss(self, of_A: np.ndarray) -> float | None:
        weights_A = np.asarray(self.weights_A)
        of_A = of_A & (weights_A > 0)
        losses = np.asarray(self.losses_A, np.float64)[of_A]
        return float(np.average(losses, weights=weights_A[of_A])) if len(losses) else None

    def bad(self, suspects: Sequence[str]) -> dict[int, str]:
        """For each microbatch that was left out, but for overflows, the first thing that was not
        finite.

        Args:
            suspects: `finite.suspects` of the model.
        """
        is_fine_A = self.finite_A | self.overflowed_A
        return {
            number: NORM if first == NONE else suspects[first]
            for number, first in enumerate(np.asarray(self.first_bad_A).tolist())
            if not is_fine_A[number]
        }


DROPOUT = 0xD0
"""Sets the random numbers of dropout apart from those that start the weights."""

TrainStep = Callable[..., StepResult]


class Told(NamedTuple):
    """What microbatches have to tell beside their gradients, of all devices' parts together."""

    losses_A: Array
    """Summed over the targets that count, over the number of all targets."""
    weights_A: Array
    """Share of the targets that count."""
    routing: Routing | None


def make_train_step(train: TrainConfig, mesh: Mesh | None = None) -> TrainStep:
    """A compiled function of (model, optimizer, inputs_ABS, targets_ABS) that trains one step.

    Model and optimizer are updated in place, their old memory reused. With a fifth argument, a
    limit in nats, they stay as they are where the step's loss is above it.

    Args:
        mesh: that model and optimizer were created on; one device where absent.
    """
    layout = Layout.of(train.sharding, mesh)

    def train_step(
        model: GPT,
        optimizer: MultiSteps,
        inputs_ABS: Array,
        targets_ABS: Array,
        loss_limit: Array | float = jnp.inf,
    ) -> StepResult:
        key = dropout_key(train, optimizer.step[...])
        scaling = optimizer.loss_scale
        loss_scale = None if scaling is None else scaling.scale[...]
        batch = inputs_ABS, targets_ABS, key, loss_scale
        gradient_sum, told, first_bad_A = gradients(train, layout, model, optimizer.wrt, *batch)
        losses_A, weights_A, routing = told
        is_finite_A = first_bad_A == NONE
        weight = jnp.where(is_finite_A, weights_A, 0).sum()
        skipped = jnp.where(is_finite_A, losses_A, 0).sum() > loss_limit * weight
        update = optimizer.update(model, gradient_sum, weight, skipped)
        if scaling is not None:
            scaling.adapt(overflows(first_bad_A).any())
        keep_layout(layout, model, optimizer)
        return StepResult(
            losses_A / weights_A,
            weights_A,
            first_bad_A,
            skipped,
            update.learning_rate,
            update.gradient_norm,
            update.clipped,
            routing and Routing(routing.counts_E.sum(axis=0), routing.balance_loss.mean()),
            loss_scale,
        )

    return nnx.jit(train_step, donate_argnums=(0, 1))


def overflows(first_bad_A: Any) -> Any:
    """Whether the loss was finite, but a gradient was not."""
    return (first_bad_A > 0) & (first_bad_A != NONE)


def dropout_key(train: TrainConfig, step: Array | int) -> Array:
    """The key of a step's dropout."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(train.seed), DROPOUT), step)


def gradients(
    train: TrainConfig,
    layout: Layout,
    model: GPT,
    wrt: Any,
    inputs_ABS: Array,
    targets_ABS: Array,
    key: Array,
    scale: Array | None = None,
) -> tuple[nnx.State, Told, Array]:
    """The sum of the finite microbatches' gradients, what they tell, and their `first_bad_A`.

    A device adds up its own gradients, which are summed over the devices once, at the end. Those
    of parameters that it has a part of are summed as they come: each whole would take the memory
    that dividing them spares.

    Args:
        wrt: the kind of parameters that gradients are wanted of.
        key: of the step's dropout.
        scale: what the loss is multiplied by, and its gradient divided by, if by anything.
    """
    graph, *states = nnx.split(model, wrt, ...)
    trained, frozen = states
    gathering = Gathering(layout, model, dtype_of(train))
    specs, batch, everywhere = layout.specs(trained), layout.batch_spec(3), PartitionSpec()
    is_part = jax.tree.map(lambda spec: DATA in spec, specs, is_leaf=is_spec)

    def on_each_device(
        trained: nnx.State, frozen: nnx.State, scale: Array | None, *step: Array
    ) -> tuple[nnx.State, Told, Array]:
        def objective_of(trained: nnx.State, *microbatch: Array) -> tuple[Array, Told]:
            # copies, as frozen parameters belong to the trace outside and cannot be changed here
            model = nnx.merge(graph, trained, frozen, copy=True)
            loss, told = objective(train, gathering, model, *microbatch)
            return loss if scale is None else loss * scale, told

        own = jax.tree.map(
            lambda part, w: w if part else collectives.to_varying(w, DATA), is_part, trained
        )
        total, *told = summed_gradients(objective_of, own, *step)
        total = jax.tree.map(
            lambda part, g: g if part else collectives.psum(g, DATA), is_part, total
        )
        if scale is not None:
            total = jax.tree.map(lambda g: g / scale, total)
        return total, *told

    on_all = jax.shard_map(
        on_each_device,
        mesh=layout.mesh,
        in_specs=(specs, layout.specs(frozen), everywhere, batch, batch, everywhere),
        out_specs=(specs, everywhere, everywhere),
    )
    return on_all(trained, frozen, scale, inputs_ABS, targets_ABS, key)


def summed_gradients(
    objective_of: Callable[..., tuple[Array, Told]],
    trained: nnx.State,
    inputs_ABS: Array,
    targets_ABS: Array,
    key: Array,
) -> tuple[nnx.State, Told, Array]:
    """This device's gradients, one microbatch after the other; those whose loss or gradient is not
    finite, on any device, do not count."""
    count, rows, _ = inputs_ABS.shape
    first_row = collectives.axis_index(DATA) * rows

    def microbatch(
        total: nnx.State, batch: tuple[Array, Array, Array]
    ) -> tuple[nnx.State, tuple[Told, Array]]:
        inputs_BS, targets_BS, number = batch
        sequences_B = number * rows * collectives.axis_size(DATA) + first_row + jnp.arange(rows)
        (_, told), gradient = jax.value_and_grad(objective_of, has_aux=True)(
            trained, inputs_BS, targets_BS, sequences_B, key
        )
        first_bad = collectives.pmin(first_not_finite((told.losses_A, gradient)))
        counts = first_bad == NONE
        total = jax.tree.map(lambda t, g: t + jnp.where(counts, g, 0), total, gradient)
        return total, (told, first_bad)

    nothing = jax.tree.map(jnp.zeros_like, trained)
    batches = inputs_ABS, targets_ABS, jnp.arange(count)
    total, (told, first_bad_A) = jax.lax.scan(microbatch, nothing, batches)
    return total, told, first_bad_A


def objective(
    train: TrainConfig,
    gathering: Gathering,
    model: GPT,
    inputs_BS: Array,
    targets_BS: Array,
    sequences_B: Array,
    key: Array,
) -> tuple[Array, Told]:
    """What this device's part of a microbatch adds to what training makes small.

    Args:
        model: with this device's part of the weights.
        sequences_B: number of each sequence within the step, which with `key` makes its dropout.

    Returns:
        The loss summed over the targets that count, plus the load-balancing loss for each of them,
        over the number of all devices' targets; and what there is to tell of the microbatch.
    """
    gathering.outside_blocks(model)
    compute = Compute(dtype_of(train), train.remat, train.scan_unroll, gathering.of_layer)
    dropout = Dropout.of(train.drop_rate, key, sequences_B)
    total, routing = model.summed_loss(inputs_BS, targets_BS, dropout, compute)
    parts = collectives.axis_size(DATA)
    loss = total / (targets_BS.size * parts)
    weight = collectives.psum((targets_BS >= 0).mean() / parts, DATA)
    if routing is None:
        return loss, Told(collectives.psum(loss, DATA), weight, None)
    balance = train.load_balancing_weight * routing.balance_loss.mean()
    routing = routing._replace(balance_loss=collectives.psum(routing.balance_loss, DATA))
    return loss + weight * balance, Told(collectives.psum(loss, DATA), weight, routing)

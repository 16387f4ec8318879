"""Objectives: what a step minimizes, as a function of a model and a microbatch. `rungs/objectives`
has those of Rungs; `gradients.py` adds microbatches, non-finite ones, the loss scale and the mesh.
Axes as in `model/gpt.py`."""

import abc
from typing import Any, NamedTuple

from jax import Array

from rungs.model.blocks import Compute
from rungs.model.feed_forward import Routing
from rungs.model.gpt import GPT
from rungs.parallel import collectives
from rungs.parallel.sharding import TOKEN_AXES


class Microbatch(NamedTuple):
    """One microbatch; on each device, its own rows."""

    arrays: tuple[Any, ...]
    """Inputs (B, S), targets (B, S), negative where a target doesn't count, and what else the
    objective needs, each (B, S) or None."""
    sequences_B: Array
    """Index of each sequence within the step, which with `key` determines its dropout."""
    key: Array
    """Random key of the step."""


class Aux(NamedTuple):
    """Results of an objective for one microbatch, besides the number to differentiate."""

    loss: Array
    """The microbatch's share of the step's loss, summed over devices."""
    weight: Array | None
    """Divisor, summed over the finite microbatches, of their summed losses and gradients. None if
    the objective includes its divisor already."""
    routing: Routing | None = None
    """Only for a mixture of experts."""
    outputs: Any = ()
    """Arrays (B, S) for the host, with this device's rows."""
    observed_PL2: Any = ()
    """Amaxes of FP8 matmuls, see `kernels/float8.py`; not set by objectives."""


class Objective(abc.ABC):
    """What a step minimizes."""

    @abc.abstractmethod
    def loss(self, model: GPT, compute: Compute, microbatch: Microbatch) -> tuple[Array, Aux]:
        """Return this device's share of the objective on a microbatch, and the aux of all devices.

        `model` has this device's shards of the weights, gathered outside the blocks; `compute` says
        how to run the blocks."""

    @abc.abstractmethod
    def of_logits(self, logits_BSV: Array, *arrays: Any) -> Array:
        """Return the objective, up to a factor, as a function of a microbatch's logits on one
        device. `--replay` differentiates it to find the first non-finite gradient. `arrays` are
        those of `Microbatch` without the inputs."""

    def given(self, _model: GPT, microbatch: Microbatch) -> tuple[Array, Array, Array | None]:
        """Return the tokens that the model gets, the targets, and factors on their losses, if any.
        In a validation the microbatch has the data's arrays, and always the same key."""
        tokens_BS, targets_BS, *_ = microbatch.arrays
        return tokens_BS, targets_BS, None

    def starts(self, *_: Any) -> Array | None:
        """Return the position where each token's document starts, as for `GPT.forward`, from a
        microbatch's arrays; None if documents are joined."""
        return None


def mean_over_targets(
    total: Array, targets_BS: Array, routing: Routing | None, load_balancing_weight: float
) -> tuple[Array, Aux]:
    """Return an objective's result for a mean over targets: this device's share, and the aux.

    The share is the sum of the loss and the load-balancing loss over counted targets, divided by
    the number of all targets on all devices.

    Args:
        total: sum of losses over this device's counted targets.
        routing: as returned by `GPT.forward`."""
    devices = collectives.axis_size(*TOKEN_AXES)
    loss = total / (targets_BS.size * devices)
    summed_loss = collectives.psum(loss, *TOKEN_AXES)
    weight = collectives.psum((targets_BS >= 0).mean() / devices, *TOKEN_AXES)
    if routing is not None:
        balance, routing = load_balancing(routing, load_balancing_weight)
        loss += weight * balance
    return loss, Aux(summed_loss, weight, routing)


def load_balancing(routing: Routing, weight: float, microbatches: int = 1) -> tuple[Array, Routing]:
    """Return this device's weighted load-balancing loss, a mean over layers divided by the
    microbatches that it is summed over, and the routing with the loss of all devices."""
    balance = weight * (routing.balance_loss.mean() / microbatches)
    summed_balance = collectives.psum(routing.balance_loss, *TOKEN_AXES)
    return balance, routing._replace(balance_loss=summed_balance)

"""Objectives: what a step minimizes, as a function of a model and a microbatch.

An objective is a class with two methods, see `Objective`; `next_token.py` is the shortest. What it
need not know is wrapped around it in `gradients.py`: microbatches, microbatches that are not
finite, the loss scale, and the mesh.
Axes as in `model/gpt.py`, and A for the microbatches of a step.
"""

from typing import Any, NamedTuple, Protocol

from jax import Array

from rungs.model.blocks import Compute
from rungs.model.feed_forward import Routing
from rungs.model.gpt import GPT
from rungs.parallel import collectives
from rungs.parallel.mesh import TOKEN_AXES


class Microbatch(NamedTuple):
    """One microbatch; on each device, its rows of it."""

    arrays: tuple[Any, ...]
    """Inputs (B, S), targets (B, S), negative where one does not count, and what else the
    objective reads, each (B, S) or None."""
    sequences_B: Array
    """Index of each sequence within the step; with `key` it determines its dropout."""
    key: Array
    """Random key of the step."""


class Aux(NamedTuple):
    """What an objective returns besides the number to differentiate, for one microbatch."""

    loss: Array
    """The microbatch's share of the step's loss, summed over devices."""
    weight: Array | None
    """What the sum of the finite microbatches' losses and gradients is divided by, also a sum over
    them. None if the objective contains its divisor already."""
    routing: Routing | None = None
    """Of a mixture of experts."""
    outputs: Any = ()
    """Arrays (B, S) that the host reads; each device has its rows."""
    observed_PL2: Any = ()
    """In FP8, what the matmuls saw, see `kernels/float8.py`; objectives leave it out."""


class Objective(Protocol):
    """What a step minimizes."""

    def __call__(self, model: GPT, compute: Compute, microbatch: Microbatch) -> tuple[Array, Aux]:
        """Return this device's share of the objective on a microbatch, and the aux of all devices.

        Args:
            model: with this device's part of the weights; those outside the blocks are gathered.
            compute: how to run the blocks.
        """

    def starts(self, *arrays: Any) -> Array | None:
        """Return where the document of each token starts, as for `GPT.forward`, from the arrays of
        a microbatch; None if documents are joined."""

    def of_logits(self, logits_BSV: Array, *arrays: Any) -> Array:
        """Return the objective, up to a factor, as a function of the logits of a microbatch on one
        device. `--replay` differentiates it to find the first gradient that is not finite.

        Args:
            arrays: as in `Microbatch`, without the inputs.
        """


def mean_over_targets(
    total: Array, targets_BS: Array, routing: Routing | None, load_balancing_weight: float
) -> tuple[Array, Aux]:
    """Return what an objective does that is a mean over targets: this device's share, and the aux.

    The share is the sum, over the targets that count, of their loss and the load-balancing loss,
    divided by the number of all targets on all devices.

    Args:
        total: losses of this device's targets that count, summed.
        routing: as returned by `GPT.forward`.
    """
    devices = collectives.axis_size(*TOKEN_AXES)
    loss = total / (targets_BS.size * devices)
    summed_loss = collectives.psum(loss, *TOKEN_AXES)
    weight = collectives.psum((targets_BS >= 0).mean() / devices, *TOKEN_AXES)
    if routing is None:
        return loss, Aux(summed_loss, weight)
    balance = load_balancing_weight * routing.balance_loss.mean()
    summed_balance = collectives.psum(routing.balance_loss, *TOKEN_AXES)
    routing = routing._replace(balance_loss=summed_balance)
    return loss + weight * balance, Aux(summed_loss, weight, routing)
